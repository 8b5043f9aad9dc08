"""Errors, each with its remedy, for calls that are illegal in the present state of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import NoReturn

from torch import nn

from zerosync_strategy.core.attached.stage import EngineParts
from zerosync_strategy.core.engine import zero


class Guards:
    """The contexts that the program is in, and the parameters that the engine trained when it was attached.

    Attributes:
        needs_every_gradient: DeepSpeed's ``"ignore_unused_parameters"`` is false; else no step is checked for them.
        trained: the parameters of the optimizer.
        infers: the program is in ``gathered_for_inference()``.
        is_preparing: on stage 3, DeepSpeed prepares or ends a forward.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.trained, self._gradients = frozenset(parts.reducer.params), parts.reducer.gradients
        engine = parts.engine
        self.needs_every_gradient = zero.needs_every_gradient(engine)
        self._optimizer, self._names, self._window = engine.optimizer, parts.names, parts.window
        # DeepSpeed neither reduces nor steps these, and nothing can add one later.
        self._untrained = [param for param in engine.module.parameters() if not param.requires_grad]
        self._param_groups = len(zero.stepping_optimizer(engine).param_groups)
        self._postponing: list[str] = []  # active contexts of DeepSpeed in which a step is illegal
        self.infers = self.is_preparing = False

    @contextmanager
    def postponing_step(self, context: str) -> Iterator[None]:
        self._postponing.append(context)
        try:
            yield
        finally:
            self._postponing.pop()

    def refuse_in_inference(self, call: str) -> NoReturn:
        raise RuntimeError(
            f"{call} was called inside of gathered_for_inference(), which releases parameters at its end. Call it after"
            " the block."
        )

    def check_step(self) -> None:
        if self.infers:
            self.refuse_in_inference("engine.step()")
        if self._postponing:
            raise RuntimeError(
                f"engine.step() was called inside of engine.{self._postponing[-1]}, which postpones the reduction to"
                " the end of its block. Call it after the block, or leave the block out: gradients are reduced once per"
                " step in any case."
            )
        if len(self._optimizer.optimizer.param_groups) != self._param_groups:
            self.refuse_param_group()

    def check_every_gradient(self) -> None:
        """Raise ``RuntimeError`` if a trainable parameter has had no gradient since the last step."""
        missing = {each.param for each in self._gradients if each.param.requires_grad and not each.came}
        if names := [repr(name) for param, name in self._names.items() if param in missing]:
            raise RuntimeError(
                f"step() found no gradient of {zero.listed(names)} since the last step, and the configuration"
                " has 'zero_optimization.ignore_unused_parameters' = false. Use every trainable parameter in the loss,"
                " freeze those that are not used, or leave the option out: they are then stepped with gradient zero."
            )

    def window_closed(self) -> None:
        for gradient in self._gradients:
            gradient.came = False

    def refuse_param_group(self) -> None:
        raise ValueError(
            "add_param_group() was called on the optimizer of a DeepSpeed engine, which lays out what it trains when it"
            " is built: the added parameters would never be stepped. Give the optimizer all parameters before that, in"
            " as many groups as will need options of their own, and freeze after it those that are to train later. (In"
            " Lightning, a BaseFinetuning callback may freeze them before.)"
        )

    def trains(self, by_all: Iterator[nn.Parameter]) -> bool:
        """Return whether a beginning backward may give a gradient to a parameter of the optimizer.

        Raise ``RuntimeError`` if a parameter requires a gradient that no engine trains; ``by_all``: what they train.
        """
        if thawed := [param for param in self._untrained if param.requires_grad]:  # none may be left out silently (N1)
            trained = set(map(id, by_all))
            if names := [repr(self._names[param]) for param in thawed if id(param) not in trained]:
                raise RuntimeError(
                    f"backward() found that {zero.listed(names)} required no gradient when the DeepSpeed engine was"
                    " built and requires one now. ZeRO would never train it. Let it require a gradient while the engine"
                    " is built and freeze it afterwards, or build the engine anew when it is thawed; a parameter that"
                    " is not to be trained must stay frozen."
                )
        return any(param.requires_grad for param in self.trained)

    def zeroed(self, params: Set[int]) -> bool:
        """Return whether ``zero_grad()`` of a module with ``params``, by id, covers all parameters of the optimizer.

        Raise ``RuntimeError`` if it covers some, and reduced gradients are in the shards, where they cannot be dropped.
        """
        own = set(map(id, self.trained))
        if own <= params:
            return True
        if self._window.has_reduced and not own.isdisjoint(params):
            raise RuntimeError(
                "module.zero_grad() was called for some of the parameters that an optimizer trains, and their gradients"
                " are in ZeRO's shards already, or in another dtype: they were to be reduced in the backward (an"
                " announced last one, coalesce=False, grad_memory_budget) or accumulated apart (grad_accum_dtype). Call"
                " zero_grad() of the whole model or of the optimizer, or leave these options out and set"
                " overlap_last=False."
            )
        return False
