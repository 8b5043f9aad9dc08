"""The full weights of a module, one run at a time, for a consumer or for files (``checkpoints/weight_files.py``).

A run is the parameters that one message gathers. Its values are in memory of their own and the parameters stay as they
are. So nothing in the engine waits for the consumer, and a consumer that stops early leaves nothing to clean up.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.attached.engine import AttachedEngine
from zerosync_strategy.core.checkpoints.weight_files import WeightSpec, export
from zerosync_strategy.core.engine import zero, zero3
from zerosync_strategy.core.params.intercepted import Alias, Unsharded


class FullWeights:
    """The full tensors of ``module.state_dict()``; see :meth:`ZeroSync.full_weights`.

    Raises ``ValueError`` if an entry is no tensor.

    Args:
        module: the engine's, or one in it; ``None``: the engine's.
        dtype: for floating-point tensors; ``None``: their own.
    """

    def __init__(self, attached: AttachedEngine, module: torch.nn.Module | None, dtype: torch.dtype | None) -> None:
        own = attached.parts.engine.module
        if module is not None and all(each is not module for each in own.modules()):
            raise ValueError(
                f"full_weights() and export() take a module= of the engine's {type(own).__name__}, found"
                f" a {type(module).__name__} that is none. Give the engine's module or one in it."
            )
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(
                f"full_weights() and export() take a dtype= for floating-point weights, got {dtype}. Leave it out, or"
                " convert the tensors."
            )
        self.module = own if module is None else module
        self._attached, self._dtype = attached, dtype
        scheduler = self._scheduler = attached.stage.scheduler
        self._names: dict[Any, list[str]] = {}  # of each tensor; several if it is tied
        entries: dict[str, Any] = self.module.state_dict(keep_vars=True)
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
        """Specs of all tensors, in the order in which they are yielded."""
        return [
            WeightSpec(name, zero3.full_shape(tensor), self._converted(tensor.dtype), names[0] if number else "")
            for tensor in itertools.chain(*self._runs, self._others)
            for names in (self._names[tensor],)
            for number, name in enumerate(names)
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each name with its tensor, on its own device, for the caller to keep and change. Collective.

        ``RankError``: other ranks did not take part. ``RuntimeError``: an optimizer step or a checkpoint has changed
        the weights since the first tensor.
        """
        version = self._attached.stage.version()
        for run in self._runs:
            self._check(version)
            assert self._scheduler is not None
            with self._attached.activity("full_weights()"):
                values = self._scheduler.values(run, "full_weights()")
            values.reverse()
            for param in run:
                full = values.pop()  # so that only the consumer refers to it
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
        if self._attached.stage.version() != version:
            raise RuntimeError(
                "full_weights() found that an optimizer step or a checkpoint has changed the weights since its first"
                " tensor, so that the rest would be of another model. Take all of them before it."
            )


def export_weights(
    attached: AttachedEngine, directory: Path, module: torch.nn.Module | None, dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> None:  # fmt: skip
    """Write the full weights of ``module``; see :meth:`ZeroSync.export`."""
    everyone = zero.data_parallel_group(attached.parts.engine.optimizer)
    weights = FullWeights(attached, module, dtype)
    if any(dist.get_world_size(group) < dist.get_world_size(everyone) for group in weights.process_groups):
        raise ValueError(
            "export() found parameters that shard_over() gives to groups of ranks: under one name, each group has"
            " another. Write what full_weights() yields on the first rank of each group."
        )
    with attached.apart("full weights"), attached.activity("export()"):
        export(weights, weights.specs, directory, max_shard_bytes, everyone, weights.module, dtype)
