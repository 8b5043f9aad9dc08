"""The gradient shards of ZeRO-3: one per parameter, over the process group that shards it.

With an optimizer that needs whole parameters, each gradient is in the shard of its parameter's owner, and DeepSpeed's
gradient shards are empty.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zerosync_strategy.core.comm.nodes import AMONG_GATHERS, MessageSizes, Nodes, Sent
from zerosync_strategy.core.comm.owners import choose_owners
from zerosync_strategy.core.engine import zero, zero3, zero3_optimizer
from zerosync_strategy.core.gradients.buckets import GradientBucket
from zerosync_strategy.core.gradients.layout import (
    ALIGNMENT,
    ReadShard,
    ReduceScatterInput,
    RowPlacement,
    Scaling,
    ShardLayout,
    ShardPart,
    ShardSlice,
    with_zeros,
)
from zerosync_strategy.core.gradients.owned import OwnedLayout
from zerosync_strategy.core.gradients.shards import GradientShards
from zerosync_strategy.core.options import ZeroSyncConfig


class PerParamLayout(ShardLayout):
    """The shards of the parameters one after the other: each has ``columns`` elements per rank, from ``begins`` on."""

    def __init__(self, process_group: dist.ProcessGroup, params: Sequence[nn.Parameter], *common: Any) -> None:
        super().__init__(process_group, params, *common)
        numels = list(map(zero3.shard_numel, self.params))
        self.columns = dict(zip(self.params, numels, strict=True))
        self.begins = dict(zip(self.params, accumulate([0, *numels[:-1]]), strict=True))
        self.begin_list = list(self.begins.values())
        self.shard_numel = sum(numels)

    def divide(self, buckets: Sequence[Sequence[nn.Parameter]]) -> list[ColumnPlacement]:
        return [ColumnPlacement(self, params) for params in buckets]

    def shard_slices(self, param: nn.Parameter, stock: bool = False) -> list[ShardSlice]:
        columns, numel = self.columns[param], zero3.full_numel(param)
        first, last = (min((self.rank + k) * columns, numel) for k in (0, 1))
        return [ShardSlice(first, last, self.begins[param])]

    def row(self, width: int) -> int:
        """Return how many elements a row of ``width`` has as it is sent: aligned on native backends, if 1 % does it."""
        row = -(-width // ALIGNMENT) * ALIGNMENT
        return row if self.is_native and 100 * (row - width) <= width else width

    def gather_shards(self, dtype: torch.dtype, device: torch.device, read: ReadShard) -> torch.Tensor:
        rows = torch.empty(self.world_size, self.shard_numel, dtype=dtype, device=device)
        read(rows[self.rank], 0)
        self.all_gather(rows).wait()
        return rows

    def gradient_in(self, memory: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
        columns = memory.narrow(1, self.begins[param], self.columns[param])
        return columns.reshape(-1)[: zero3.full_numel(param)]


class ColumnPlacement(RowPlacement):
    """The placement of a bucket whose parameters are neighbours in ``layout``."""

    _layout: PerParamLayout

    def __init__(self, layout: PerParamLayout, params: Sequence[nn.Parameter]) -> None:
        super().__init__(layout, layout.begins[params[0]], sum(layout.columns[param] for param in params), params)
        # torch._chunk_cat divides a tensor as ZeRO-3 does.
        for param in params:
            assert layout.columns[param] == -(-zero3.full_numel(param) // layout.world_size)

    def inputs(
        self, memory: torch.Tensor, most: int, nodes: Nodes | None, scaling: Scaling
    ) -> Iterator[ReduceScatterInput]:
        if len(self.order) == 1:
            yield from super().inputs(memory, most // ALIGNMENT * ALIGNMENT or most, nodes, scaling)
        elif self.width:  # packed gradients are bounded by the size of a bucket; a single parameter may be larger
            rows = scaling.of(memory.view(self._layout.world_size, -1), self._layout.dtype)
            yield ReduceScatterInput(rows, ShardPart(self.offset, self.width, 0))

    def _columns(self, memory: torch.Tensor, first: int, count: int) -> torch.Tensor:
        world_size, row = self._layout.world_size, self._layout.row(count)
        full, rest = divmod(len(memory), self.width)  # rows
        if full == world_size and row == count:
            return super()._columns(memory, first, count)
        columns = memory.new_zeros(world_size, row)  # a gradient without its padding
        columns[:full, :count] = memory[: full * self.width].view(full, self.width)[:, first : first + count]
        if full < world_size:
            last = memory[full * self.width + first : full * self.width + min(first + count, rest)]
            columns[full, : len(last)] = last
        return columns

    def pack(
        self, gradients: Sequence[torch.Tensor | None], dtype: torch.dtype, above: torch.Tensor | None
    ) -> torch.Tensor:
        """Pack as the rows of all ranks, in the dtype of the reduction. A single gradient is left as it is."""
        to, world_size, row = self._layout.dtype, self._layout.world_size, self._layout.row(self.width)
        found = {gradient.dtype for gradient in gradients if gradient is not None}
        pieces = with_zeros(self.order, gradients, dtype if found == {dtype} else to)
        if len(pieces) == 1:
            return pieces[0]
        if row > self.width:
            pieces.append(pieces[0].new_zeros(world_size * (row - self.width)))
        packed = torch.empty(world_size, row, dtype=to, device=pieces[0].device)
        torch._chunk_cat(pieces, 0, world_size, out=packed)
        return packed.view(-1)


class PerParamShards(GradientShards):
    """Gradient shards in DeepSpeed's buffer; with owners, in :attr:`owned`, by layout, for one window."""

    layouts: list[PerParamLayout | OwnedLayout]

    def _read_layouts(self) -> list[PerParamLayout | OwnedLayout]:
        optimizer = self.optimizer
        self.on_device = not zero.offloads(optimizer)
        self.owned: dict[OwnedLayout, torch.Tensor] = {}
        self._ranges: dict[tuple[PerParamLayout, int, int], _Ranges] = {}
        by_group: dict[dist.ProcessGroup, list[nn.Parameter]] = {}
        for param in (param for group in zero3_optimizer.param_groups(optimizer) for param in group):
            by_group.setdefault(zero3_optimizer.gradient_group(optimizer, param), []).append(param)
        everyone = dist.get_world_size(self.group)
        layouts: list[PerParamLayout | OwnedLayout] = []
        for process_group, params in by_group.items():
            # The loss is the mean over all data-parallel ranks, and so is its gradient, however few share a parameter.
            ranks = max(dist.get_world_size(process_group), everyone)
            divisor = zero3_optimizer.averaging_divisor(optimizer, params, ranks)
            common = (divisor, self.dtype, self.topology.of(process_group), self.counter)
            if not self.whole:
                layouts.append(PerParamLayout(process_group, params, *common))
                continue
            owners = choose_owners(map(zero3.full_shape, params), process_group)
            offsets = dict(zip(params, itertools.accumulate([0, *map(zero3.full_numel, params)]), strict=False))
            owner_of = dict(zip(params, owners, strict=True))
            layouts.append(OwnedLayout(offsets, owner_of, process_group, *common))
        self.over_groups = any(layout.world_size < everyone for layout in layouts)
        return layouts

    def most_bytes(self, config: ZeroSyncConfig, sizes: MessageSizes) -> int:
        holds_all = config.parameters.device is None and not config.parameters.automatic
        return sizes.nbytes if holds_all else min(sizes.nbytes, AMONG_GATHERS)

    def make_buckets(self, config: ZeroSyncConfig, limit: int, common: dict[str, Any]) -> list[GradientBucket]:
        # With several layouts, buckets of later modules are first.
        buckets = super().make_buckets(config, limit, common)
        return sorted(buckets, key=lambda bucket: -max(map(zero3.param_id, bucket.params)))

    def allocate(self) -> None:  # DeepSpeed keeps its own
        for layout in self.layouts:
            if isinstance(layout, OwnedLayout):
                device = layout.params[0].device
                self.owned[layout] = self.local.empty(layout.shard_numel, self.local.dtype, device)

    def parts(self, layout: PerParamLayout | OwnedLayout, offset: int, numel: int) -> list[torch.Tensor]:
        if isinstance(layout, OwnedLayout):
            return [self.owned[layout].narrow(0, offset, numel)]
        shards, key = zero3_optimizer.gradient_shards(self.optimizer), (layout, offset, numel)
        known = self._ranges.get(key)
        if not numel:
            return []
        if known is None or known.made_of() is not shards[known.ranges[0].param_id]:
            known = self._ranges[key] = _ranges(shards, layout, offset, numel)
        return [shards[one.param_id].as_strided((one.numel,), (1,), one.begin) for one in known.ranges]

    def hand_over(self) -> None:
        if not self.whole:
            zero3_optimizer.hand_over_gradients(self.optimizer, self.params, joined=self.computes_norm)
            return
        # DeepSpeed gets what this rank counts in the norm. The step reads `owned`.
        by_group = [list(self.owned.values())]
        if not self.computes_norm:
            own, nothing = {param: part for param, _, part in self.of_params()}, by_group[0][0][:0]
            groups = zero3_optimizer.param_groups(self.optimizer)
            by_group = [[own.get(param, nothing) for param in group] for group in groups]
        zero3_optimizer.give_gradients(self.optimizer, by_group)

    def layout_of(self, param: nn.Parameter) -> OwnedLayout:
        return next(layout for layout in self.layouts if isinstance(layout, OwnedLayout) and param in layout.owners)

    @functools.cached_property
    def computes_norm(self) -> bool:
        """Whether the norm is computed here, from the shards of all ranks, which together have each element once."""
        return self.on_device and not zero3_optimizer.is_model_parallel(self.optimizer)

    def norm(self, said: torch.Tensor) -> torch.Tensor:
        """Return the norm as the base class says, also where groups of ranks shard parameters (U3).

        DeepSpeed computes norms by parameter group, each summed over the ranks that shard the group. Other groups of
        ranks have other parameters. So each rank adds its share of the square, and each element counts once.
        """
        optimizer = self.optimizer
        if self.computes_norm:
            return zero3_optimizer.norm_of_shards(optimizer, said, self.sum_over_ranks)
        norms = torch.stack([torch.as_tensor(norm) for norm in optimizer.zerosync_stock_norms()])
        # DeepSpeed marks the norm of a group with an infinity or a NaN by -1.
        norms = torch.where(norms >= 0, norms, torch.inf)
        if not self.over_groups:
            return norms.norm().double().view(1)
        squares = norms.double().square().to(self.params[0].device)  # offloaded, they are on the host
        for index, group in enumerate(zero3_optimizer.param_groups(optimizer)):
            world_size = dist.get_world_size(zero3_optimizer.gradient_group(optimizer, group[0]))
            squares[index] /= zero3_optimizer.averaging_divisor(optimizer, group, world_size)
        total = squares.sum()
        self.sum_over_ranks(total)
        return total.sqrt().to(norms.dtype).double().view(1)

    def discard(self) -> None:
        zero3_optimizer.give_gradients(self.optimizer, [])
        self.owned.clear()

    def stepped(self) -> None:
        if self.whole:
            self.discard()

    def parameters_floor(self) -> dict[nn.Parameter, Sent]:
        floor = {}
        for param in self.optimizer.module.parameters():  # also the parameters that the optimizer does not train
            group = zero3_optimizer.gradient_group(self.optimizer, param)
            floor[param] = self.topology.sent(zero3.full_bytes(param), group)
        return floor


class _Range(NamedTuple):
    """Consecutive elements of the storage of which the shard of ``param_id`` is a view, from ``begin`` on."""

    param_id: int
    begin: int
    numel: int


class _Ranges(NamedTuple):
    """Ranges of a part of the shard, valid while ``made_of`` (weak) is still the first of its gradient shards."""

    made_of: Callable[[], torch.Tensor | None]
    ranges: list[_Range]


def _ranges(shards: Mapping[int, torch.Tensor], layout: PerParamLayout, offset: int, numel: int) -> _Ranges:
    """Return ``numel`` elements of this rank's shard in as few ranges as possible. DeepSpeed has them in one buffer."""
    begins, ranges, last = layout.begin_list, list[_Range](), None
    index, end = bisect_right(begins, offset) - 1, offset + numel
    first_id = zero3.param_id(layout.params[index])
    while offset < end:
        param_id = zero3.param_id(layout.params[index])
        shard = shards[param_id]
        first = offset - begins[index]
        size = min(shard.numel(), end - begins[index]) - first
        begin, memory = int(shard.storage_offset()) + first, shard.untyped_storage().data_ptr()
        if ranges and memory == last and ranges[-1].begin + ranges[-1].numel == begin:
            ranges[-1] = ranges[-1]._replace(numel=ranges[-1].numel + size)
        else:
            ranges.append(_Range(param_id, begin, size))
        last = memory
        offset += size
        index += 1
    return _Ranges(weakref.ref(shards[first_id]), ranges)
