"""The reduction of ZeRO-3: each parameter is sharded by itself; it may be resharded while its gradient is unsharded."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.messages import AMONG_GATHERS, Messages
from zerosync_strategy.core.comm.nodes import Sent
from zerosync_strategy.core.comm.stripes import ShardSlice
from zerosync_strategy.core.engine import zero, zero3, zero3_optimizer
from zerosync_strategy.core.gradients.buckets import (
    GradientBucket,
    ReduceScatterInput,
    ShardLayout,
    choose_buckets,
)
from zerosync_strategy.core.gradients.local import LocalGradient
from zerosync_strategy.core.gradients.reducer import Reducer, StepSlices, step_slices
from zerosync_strategy.core.options.config import ZeroSyncConfig


class PerParamLayout(ShardLayout):
    """Parameter ``params[i]`` has ``shard_numels[i]`` columns, which begin where those of the one before end."""

    def __init__(
        self, process_group: Any, params: Sequence[Any], shard_numels: Sequence[int], divisor: float, dtype: torch.dtype
    ) -> None:
        super().__init__(process_group, params, sum(shard_numels), divisor, dtype)
        self.shard_numels = dict(zip(params, shard_numels, strict=True))
        self.columns: dict[Any, int] = {}
        column = 0
        for param, shard_numel in self.shard_numels.items():
            self.columns[param] = column
            column += shard_numel
        self.column_list = list(self.columns.values())

    def matrices(self, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
        yield memory.view(self.world_size, self.shard_numel), 0

    def gradient_in(self, memory: torch.Tensor, param: Any) -> torch.Tensor:
        rows = memory.view(self.world_size, self.shard_numel)
        columns = rows.narrow(1, self.columns[param], self.shard_numels[param])
        return columns.reshape(-1)[: zero3.full_numel(param)]

    def shard_slices(self, param: Any) -> list[ShardSlice]:
        shard_numel, numel = self.shard_numels[param], zero3.full_numel(param)
        first, last = (min((self.rank + k) * shard_numel, numel) for k in (0, 1))
        return [ShardSlice(first, last, self.columns[param])]


class UnpackedBucket(GradientBucket):
    """A bucket whose gradients stay where autograd accumulates them until they are reduced."""

    def collect(self, gradient: LocalGradient) -> None:
        param, place = gradient.param, gradient.place
        found = param.grad
        if found is None:
            if self.local.converts:
                zero.set_accumulated_gradient(param, None)  # a hook has dropped it
            return
        if self.local.converts:
            more, before = found.detach().to(self.local.dtype), zero.accumulated_gradient(param)
            found = more if before is None else before.add_(more)
            zero.set_accumulated_gradient(param, found)
            param.grad = None
        if place is None:
            self.local.count(self.local.nbytes(param))
        gradient.place = found

    def _drop(self) -> None:
        self.local.count(-sum(self.local.nbytes(each.param) for each in self.gradients if each.place is not None))
        for gradient in self.gradients:
            gradient.place = gradient.param.grad = None
            if self.local.converts:
                zero.set_accumulated_gradient(gradient.param, None)

    def _gradient(self, param: Any) -> torch.Tensor | None:
        return zero.accumulated_gradient(param) if self.local.converts else param.grad

    def _pieces(self, params: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return the ``gradients`` of ``params``, flat, with zeros where there is none."""
        return [
            torch.zeros(zero3.full_numel(param), dtype=self.dtype, device=param.device)
            if gradient is None
            else gradient.reshape(-1)
            for param, gradient in zip(params, gradients, strict=True)
        ]


class PerParamBucket(UnpackedBucket):
    """A bucket of one layout, packed in one call."""

    layout: PerParamLayout

    def __init__(self, *common: Any, **named: Any) -> None:
        super().__init__(*common, **named)
        layout, params = self.layout, self.params
        self._width = sum(layout.shard_numels[param] for param in params)
        # torch._chunk_cat cuts a tensor as ZeRO-3 does: into shards that are as even as can be, the last ones padded.
        for param in params:
            assert layout.shard_numels[param] == -(-zero3.full_numel(param) // layout.world_size)
        self.target = (layout.columns[params[0]], self._width)

    def reduce_scatter_inputs(self, factor: float) -> Iterator[ReduceScatterInput]:
        layout = self.layout
        gradients = [self._gradient(param) for param in self.params]
        device = self.params[0].device
        shape = layout.world_size, self._width
        dense = gradients[0]
        if len(gradients) == 1 and dense is not None and dense.is_contiguous() and dense.numel() == shape[0] * shape[1]:
            packed = dense.view(shape).to(layout.dtype)  # as it lies
        elif all(gradient is None for gradient in gradients):
            packed = torch.zeros(shape, dtype=layout.dtype, device=device)
        else:
            packed = torch.empty(shape, dtype=layout.dtype, device=device)
            pieces = self._pieces(self.params, gradients)
            if any(piece.dtype is not self.dtype for piece in pieces):
                pieces = [piece.to(layout.dtype) for piece in pieces]
            torch._chunk_cat(pieces, 0, layout.world_size, out=packed)
        self._reads(*gradients)
        if factor != 1.0:
            packed.mul_(factor)
        offset, width = self.target
        # Packed, it has the size of a bucket already; a parameter as it lies may be larger.
        yield from self._by_columns(packed, offset, self._chunk_width if len(self.params) == 1 else width)


class Stage3Reducer(Reducer):
    """Reduces into one shard per parameter, over the process group that shards the parameter."""

    layouts: list[PerParamLayout]
    bucket_class: type[UnpackedBucket] = PerParamBucket

    def _most_bytes(self, config: ZeroSyncConfig, messages: Messages) -> int:
        holds_all = config.parameters.device is None and not config.parameters.automatic
        return messages.nbytes if holds_all else min(messages.nbytes, AMONG_GATHERS)

    def _read_layouts(self) -> list[PerParamLayout]:
        self._runs: dict[tuple[PerParamLayout, int, int], _Runs] = {}
        optimizer = self.optimizer
        self.shards_on_device = not zero.offloads(optimizer)
        by_group: dict[Any, list[Any]] = {}
        for param in (param for group in zero3_optimizer.param_groups(optimizer) for param in group):
            by_group.setdefault(zero3_optimizer.gradient_group(optimizer, param), []).append(param)
        layouts = []
        for process_group, params in by_group.items():
            world_size = dist.get_world_size(process_group)
            shard_numels = [zero3.shard_numel(param) for param in params]
            # The loss is the mean over all data-parallel ranks; so is its gradient, however few share a parameter.
            ranks = max(world_size, dist.get_world_size(zero.data_parallel_group(optimizer)))
            divisor = zero3_optimizer.averaging_divisor(optimizer, params, ranks)
            layouts.append(PerParamLayout(process_group, params, shard_numels, divisor, self._dtype))
        return layouts

    def _make_buckets(self, config: ZeroSyncConfig, limit: int, common: dict[str, Any]) -> list[UnpackedBucket]:
        buckets = [
            self.bucket_class(layout, params, level, **common)
            for layout, chosen in choose_buckets(self.layouts, self.local, config, limit)
            for params, level in chosen
        ]
        # With several layouts, those of the later modules first.
        return sorted(buckets, key=lambda bucket: -max(map(zero3.param_id, bucket.params)))

    def allocate_shards(self) -> None:
        pass  # DeepSpeed keeps them

    def shard_parts(self, layout: PerParamLayout, offset: int, numel: int) -> list[torch.Tensor]:
        shards, key = zero3_optimizer.gradient_shards(self.optimizer), (layout, offset, numel)
        known = self._runs.get(key)
        if not numel:
            return []
        if known is None or known.made_of() is not shards[known.runs[0].param_id]:
            known = self._runs[key] = _runs(shards, layout, offset, numel)
        return [shards[run.param_id].as_strided((run.numel,), (1,), run.begin) for run in known.runs]

    def hand_over(self) -> None:
        zero3_optimizer.hand_over_gradients(self.optimizer, self.params, joined=self._computes_norm)

    @property
    def _computes_norm(self) -> bool:
        """Whether the norm is that of all shards of all ranks, which have each element once, where they are."""
        return self.shards_on_device and not zero3_optimizer.is_model_parallel(self.optimizer)

    @property
    def over_groups(self) -> bool:
        """Whether some parameters are sharded over fewer ranks than all; the same on every rank."""
        everyone = dist.get_world_size(zero.data_parallel_group(self.optimizer))
        return any(layout.world_size < everyone for layout in self.layouts)

    def _compute_norm(self) -> torch.Tensor:
        """As in the base class, over groups of ranks too (U3).

        Where DeepSpeed computes it, it does by group of parameters, and sums over the ranks that shard these.
        Parameters of another group of ranks are others, so each of its ranks adds its share of the square, and each
        element counts once.
        """
        from deepspeed import comm

        optimizer = self.optimizer
        if self._computes_norm:
            return zero3_optimizer.norm_of_shards(optimizer)
        norms = torch.stack([torch.as_tensor(norm) for norm in zero3_optimizer.stock_norms(optimizer)])
        # DeepSpeed marks the norm of a group with an infinity or a NaN by -1.
        norms = torch.where(norms >= 0, norms, torch.inf)
        if not self.over_groups:
            return norms.norm()
        squares = norms.double().square().to(self.params[0].device)  # offloaded, they are on the host
        for index, group in enumerate(zero3_optimizer.param_groups(optimizer)):
            world_size = dist.get_world_size(zero3_optimizer.gradient_group(optimizer, group[0]))
            squares[index] /= zero3_optimizer.averaging_divisor(optimizer, group, world_size)
        total = squares.sum()
        comm.all_reduce(total, group=zero.data_parallel_group(optimizer))
        return total.sqrt().to(norms)

    def master_shards(self) -> list[zero.MasterShard]:
        return zero3_optimizer.master_shards(self.optimizer)

    def masters_in_groups(self) -> AbstractContextManager[None]:
        return zero3_optimizer.masters_in_groups(self.optimizer)

    def states_made(self) -> None:
        pass  # no parameter refers to them

    def step_slices(self) -> StepSlices:
        """As in the base class; nothing is sent by slice, but the C library gives small temporary tensors at once."""
        masters = zero3_optimizer.flat_master_weights(self.optimizer)
        return [(flat, list(step_slices(flat, 0, flat.numel()))) for flat in masters]

    def _discard_shards(self) -> None:
        zero3_optimizer.discard_gradients(self.optimizer)

    def parameters_floor(self) -> dict[Any, Sent]:
        floor = {}
        for param in self.optimizer.module.parameters():  # those that it does not train, too
            group = zero3_optimizer.gradient_group(self.optimizer, param)
            floor[param] = self.topology.sent(zero3.full_bytes(param), group)
        return floor


class _Run(NamedTuple):
    """Elements that lie one after the other in the memory of which that shard is a view, as are the others."""

    param_id: int
    begin: int
    numel: int


class _Runs(NamedTuple):
    """Runs, as long as the first of the shards is still this one; it is not kept."""

    made_of: Callable[[], torch.Tensor | None]
    runs: list[_Run]


def _runs(shards: Mapping[int, torch.Tensor], layout: PerParamLayout, offset: int, numel: int) -> _Runs:
    """Return ``numel`` elements of a rank's shard in as few runs as can be: DeepSpeed lays them into one buffer."""
    columns, runs, last = layout.column_list, list[_Run](), None
    index, end = bisect_right(columns, offset) - 1, offset + numel
    first_id = zero3.param_id(layout.params[index])
    while offset < end:
        param_id = zero3.param_id(layout.params[index])
        shard = shards[param_id]
        first = offset - columns[index]
        size = min(shard.numel(), end - columns[index]) - first
        begin, memory = int(shard.storage_offset()) + first, shard.untyped_storage().data_ptr()
        if runs and memory == last and runs[-1].begin + runs[-1].numel == begin:
            runs[-1] = runs[-1]._replace(numel=runs[-1].numel + size)
        else:
            runs.append(_Run(param_id, begin, size))
        last = memory
        offset += size
        index += 1
    return _Runs(weakref.ref(shards[first_id]), runs)
