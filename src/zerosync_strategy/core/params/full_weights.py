"""The full weights of a module, one run at a time, for whoever saves them or gives them to an inference engine.

A run is of parameters that one message gathers. Its values are memory of their own and the parameters stay as
they are, so that nothing of the engine waits for the consumer, and a consumer that stops early leaves nothing behind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.params.intercepted import Alias, Unsharded
from zerosync_strategy.core.params.scheduler import GatherScheduler


class WeightSpec(NamedTuple):
    """One entry of a module's ``state_dict()``, with the shape and dtype of the tensor that is yielded.

    ``tied_to``: the name under which the same tensor comes before; empty if it has no other.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tied_to: str


class FullWeights:
    """The tensors of ``module.state_dict()``, in full. A ``ValueError``: an entry is no tensor.

    Args:
        module: of an attached engine, or in it.
        scheduler: gathers the parameters; ``None``: they are not sharded.
        dtype: for floating-point tensors; ``None``: their own.
        version: returns another value once the weights are others.
        activity: around what communicates.
    """

    def __init__(
        self, module: torch.nn.Module, scheduler: GatherScheduler | None, dtype: torch.dtype | None,
        version: Callable[[], int], activity: Callable[[str], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self._scheduler, self._dtype, self._version, self._activity = scheduler, dtype, version, activity
        self._names: dict[Any, list[str]] = {}  # of each tensor; several where it is tied
        entries: dict[str, Any] = module.state_dict(keep_vars=True)
        for name, tensor in entries.items():
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(
                    f"The entry {name!r} of the state_dict() is no tensor but a {type(tensor).__name__}, the extra"
                    " state of a module. Take the weights of a module= without it, or save a checkpoint."
                )
            self._names.setdefault(tensor, []).append(name)
        sharded = [tensor for tensor in self._names if zero3.is_sharded(tensor)]
        self._runs = [run for _, runs in scheduler.runs(sharded) for run in runs] if scheduler is not None else []
        known = set(itertools.chain.from_iterable(self._runs))
        self._others = [tensor for tensor in self._names if tensor not in known]
        self.process_groups = {zero3.process_group(param) for param in known}

    @property
    def specs(self) -> list[WeightSpec]:
        """Of all tensors, in the order in which they are yielded."""
        return [
            WeightSpec(name, zero3.full_shape(tensor), self._converted(tensor.dtype), names[0] if number else "")
            for tensor in itertools.chain(*self._runs, self._others)
            for names in (self._names[tensor],)
            for number, name in enumerate(names)
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each name with its tensor, on its own device and the caller's to keep and to change. Collective.

        ``RankError``: other ranks did not take part. ``RuntimeError``: an optimizer step or a checkpoint has changed
        the weights since the first.
        """
        version = self._version()
        for run in self._runs:
            self._check(version)
            assert self._scheduler is not None
            with self._activity("full_weights()"):
                values = self._scheduler.values(run, "full_weights()")
            values.reverse()
            for param in run:
                full = values.pop()  # so that only the consumer has it
                yield from self._named(param, full.to(self._converted(full.dtype)))
                del full
        for tensor in self._others:
            self._check(version)
            plain = tensor.clone() if isinstance(tensor, (Alias, Unsharded)) else tensor.detach()
            yield from self._named(tensor, plain.to(self._converted(plain.dtype), copy=True))

    def _named(self, tensor: Any, full: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._names[tensor]:
            yield name, full

    def _converted(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype

    def _check(self, version: int) -> None:
        if self._version() != version:
            raise RuntimeError(
                "full_weights() found that an optimizer step or a checkpoint has changed the weights since its first"
                " tensor, so that the rest would be of another model. Take all of them before it."
            )
