"""The full weights of a module, gathered a few at a time: for a consumer, files, or the first rank of each group.

One message gathers a *chunk* of parameters, into new memory, and the parameters stay sharded. So nothing in the engine
waits for the consumer, and a consumer that stops early leaves nothing to clean up.

DeepSpeed collects full parameters on rank 0, which lacks those that other groups of ranks shard. In a full state, the
first rank that shards a parameter has it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from zerosync_strategy.core.attached.engine import AttachedEngine
from zerosync_strategy.core.checkpoints.weight_files import WeightSpec, export
from zerosync_strategy.core.comm.collectives import gather_objects
from zerosync_strategy.core.engine import zero, zero3, zero3_optimizer
from zerosync_strategy.core.engine.types import DeepSpeedEngine
from zerosync_strategy.core.params.intercepted import Alias, Unsharded
from zerosync_strategy.core.params.module_parameters import full_parameters


class FullWeights:
    """The full tensors of ``module.state_dict()``; see :meth:`ZeroSync.full_weights`.

    Raises ``ValueError`` if an entry is no tensor.

    Args:
        module: the engine's, or one in it; ``None``: the engine's.
        dtype: for floating-point tensors; ``None``: their own.
        entries: by name, in the place of those of the ``state_dict()``.
    """

    def __init__(
        self, attached: AttachedEngine, module: torch.nn.Module | None = None, dtype: torch.dtype | None = None,
        entries: Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
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
        self._names: dict[torch.Tensor, list[str]] = {}  # of each tensor; several if it is tied
        entries = self.module.state_dict(keep_vars=True) if entries is None else entries
        for name, tensor in entries.items():
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(
                    f"The entry {name!r} of the state_dict() is no tensor but a {type(tensor).__name__}, the extra"
                    " state of a module. Take the weights of a module= without it, or save a checkpoint."
                )
            self._names.setdefault(tensor, []).append(name)
        sharded = [tensor for tensor in self._names if zero3.is_sharded(tensor)]
        by_group = () if scheduler is None else scheduler.chunks(sharded)
        self._chunks = [chunk for _, chunks in by_group for chunk in chunks]
        known = set(itertools.chain.from_iterable(self._chunks))
        self._others = [tensor for tensor in self._names if tensor not in known]
        self.process_groups = {zero3.process_group(param) for param in known}

    @property
    def specs(self) -> list[WeightSpec]:
        """Specs of all tensors, in the order in which they are yielded."""
        return [
            WeightSpec(name, zero3.full_shape(tensor), self._converted(tensor.dtype), names[0] if number else "")
            for tensor in itertools.chain(*self._chunks, self._others)
            for names in (self._names[tensor],)
            for number, name in enumerate(names)
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each name with its tensor, on its own device, for the caller to keep and change. Collective.

        ``RankError``: other ranks did not take part. ``RuntimeError``: an optimizer step or a checkpoint has changed
        the weights since the first tensor.
        """
        version = self._attached.stage.version()
        for chunk in self._chunks:
            self._check(version)
            assert self._scheduler is not None
            with self._attached.activity("full_weights()"):
                values = self._scheduler.values(chunk, "full_weights()")
            values.reverse()
            for param in chunk:
                full = values.pop()  # so that only the consumer refers to it
                yield from self._named(param, full.to(self._converted(full.dtype)))
                del full
        for tensor in self._others:
            self._check(version)
            plain = tensor.clone() if isinstance(tensor, (Alias, Unsharded)) else tensor.detach()
            yield from self._named(tensor, plain.to(self._converted(plain.dtype), copy=True))

    def _named(self, tensor: torch.Tensor, full: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
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


# ---- the state of each group's first rank ------------------------------------------------------------------------


def full_state(attached: AttachedEngine) -> dict[str, torch.Tensor]:
    """Return the parameters of which this rank is the first that shards them; see :meth:`ZeroSync.full_state`.

    Collective. The results of all ranks are the model; one name on two ranks means two parameters, of two groups.
    """
    _check_stage(engine := attached.parts.engine)
    params = dict(engine.module.named_parameters())
    with attached.apart("full weights"), attached.activity("full_state()"):
        weights = FullWeights(attached, entries=params)
        own = {name: full.to("cpu", copy=True) for name, full in weights if _is_first(params[name])}
    return {name: own[name] for name in params if name in own}


def load_full_state(attached: AttachedEngine, state: Mapping[str, torch.Tensor]) -> None:
    """Set the parameters to those that ``full_state`` returned on this rank; see :meth:`ZeroSync.load_full_state`.

    Optimizer states stay. If it raises, it has set nothing.
    """
    _check_stage(engine := attached.parts.engine)
    problem = next(_misfits(engine, state), None)
    for found in filter(None, gather_objects(problem, zero.data_parallel_group(engine.optimizer))):
        raise ValueError(f"load_full_state() needs, of full_state(), what the same rank was given: {found}")
    for name, param in engine.module.named_parameters():
        with full_parameters(engine, [param]):
            if _is_first(param):
                param.data.copy_(state[name])
    zero3_optimizer.reload_master_weights(engine.optimizer)


def _check_stage(engine: DeepSpeedEngine) -> None:
    if zero.stage(engine) != 3:
        raise ValueError(
            f"full_state() and load_full_state() are for ZeRO stage 3, found stage {zero.stage(engine)},"
            " where every rank has all parameters. Use the state_dict of the module."
        )


def _misfits(engine: DeepSpeedEngine, state: Mapping[str, torch.Tensor]) -> Iterator[str]:
    for name, param in engine.module.named_parameters():
        found = tuple(state[name].shape) if name in state else None
        if _is_first(param) and found != zero3.full_shape(param):
            yield f"{name!r} of shape {zero3.full_shape(param)} on rank {dist.get_rank()}, where it found {found}."


def _is_first(param: torch.nn.Parameter) -> bool:
    return dist.get_rank(zero3.process_group(param)) == 0
