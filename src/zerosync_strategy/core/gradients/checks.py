"""What is checked of a window's gradients: that a program changes none by mistake (N1), and that none is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.engine.zero import listed
from zerosync_strategy.core.failures.errors import HANDLE
from zerosync_strategy.core.gradients.local import LocalGradient


class LocalChanges:
    """Finds changes to the local gradients between two backwards, or before the step.

    They are this rank's own, where plain data parallelism would show their average: a norm or a clamp would be wrong.
    """

    def __init__(self, params: Iterable[Any], names: Mapping[Any, str]) -> None:
        self._params = list(params)
        self._names = names
        self._seen: list[tuple[Any, torch.Tensor, int]] = []

    def note(self) -> None:
        """The gradients are as they should be."""
        with zero3.as_it_is():
            self._seen = [(param, grad, grad._version) for param in self._params if (grad := param.grad) is not None]

    def check(self, but: Any = None) -> None:
        """Raise where a gradient, ``but`` that of one parameter, has changed since :meth:`note`. It may be dropped."""
        seen, self._seen = self._seen, []
        with zero3.as_it_is():
            now_of = [param.grad for param, _, _ in seen]
        for (param, grad, version), now in zip(seen, now_of, strict=True):
            if now is None or param is but:
                continue
            # Views of one buffer have one version, which the gradient of `but` has changed for all of them.
            is_known = but is None or not now._is_view()
            if now is not grad or (is_known and now._version != version):
                name = repr(self._names.get(param, "a parameter"))
                which = f"{name}, or of a parameter beside it," if now._is_view() else name
                raise RuntimeError(
                    f"The gradient of {which} was changed between backward and step. There it is this rank's own, of"
                    " which the step will take the average; or it is in ZeRO's shards already. Change it inside 'with"
                    " zerosync.full_gradients():', where it is averaged; or inside 'with zerosync.local_gradients():',"
                    f" to change this rank's own before the reduction, which is right for what is linear. ({HANDLE}.)"
                )

    def reset(self) -> None:
        """The gradients are dropped."""
        self._seen = []


class RequiredGradients:
    """DeepSpeed's ``"ignore_unused_parameters": false``: a step without the gradient of some parameter is an error.

    Where nothing is checked, :attr:`gradient_ready` is the window's own: a gradient costs no call more.
    """

    def __init__(
        self, params: Sequence[Any], names: Mapping[Any, str], gradient_ready: Callable[[LocalGradient], None],
        is_required: bool,
    ) -> None:  # fmt: skip
        self._params, self._names, self._window_ready = params, names, gradient_ready
        self.is_required = is_required
        self.gradient_ready = self._note if is_required else gradient_ready
        self._found: set[Any] = set()

    def _note(self, gradient: LocalGradient) -> None:
        self._found.add(gradient.param)
        self._window_ready(gradient)

    def reset(self) -> None:
        """The gradients of this window are dropped."""
        self._found = set()

    def check(self) -> None:
        """Before a step, which ends the window: a ``RuntimeError`` where a trainable parameter has had no gradient."""
        if not self.is_required:
            return
        found, self._found = self._found, set()
        names = [repr(self._names[param]) for param in self._params if param.requires_grad and param not in found]
        if names:
            raise RuntimeError(
                f"step() found no gradient of {listed(names)} since the last step, and the configuration"
                " has 'zero_optimization.ignore_unused_parameters' = false. Use every trainable parameter in the loss,"
                " freeze those that are not used, or leave the option out: they are then stepped with gradient zero."
            )
