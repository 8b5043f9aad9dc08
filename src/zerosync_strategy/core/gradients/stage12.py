"""The gradient shards of ZeRO-1 and ZeRO-2: one per group, whose parameters lie in one flat buffer.

DeepSpeed gives each rank one contiguous part of a group's flat buffer. The parameters that a backward completes first
then belong to the last rank alone, and reductions during the backward would use one link after the other. So the buffer
is divided into *stripes*, each a matrix with one row per rank: its reduction and its gather are even, native
collectives, in place. A rank's shard is its rows of all stripes, in order. One stripe alone is DeepSpeed's own layout.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zerosync_strategy.core.comm.collectives import InFlight
from zerosync_strategy.core.comm.journal import SentCounter
from zerosync_strategy.core.comm.nodes import Sent
from zerosync_strategy.core.comm.owners import choose_owners
from zerosync_strategy.core.engine import zero, zero3, zero12
from zerosync_strategy.core.engine.types import ZeroOptimizer
from zerosync_strategy.core.gradients.buckets import GradientBucket
from zerosync_strategy.core.gradients.layout import (
    ALIGNMENT,
    ReadShard,
    RowPlacement,
    ShardLayout,
    ShardSlice,
    with_zeros,
)
from zerosync_strategy.core.gradients.owned import OwnedLayout
from zerosync_strategy.core.gradients.shards import GradientShards
from zerosync_strategy.core.options import ZeroSyncConfig

_ALIGNMENT = 32  # elements: where a stripe begins in the memory of its bucket


class Stripe(NamedTuple):
    """Elements ``first`` to ``last`` of the flat buffer, in rows of ``width``, at ``offset`` in every rank's shard."""

    first: int
    last: int
    width: int
    offset: int

    def rows(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the stripe of the flat buffer, one row per rank."""
        return flat[self.first : self.last].view(-1, self.width)


class Stripes:
    """The stripes of one flat buffer.

    Args:
        starts: where each stripe is to begin, ascending from 0. It begins up to ``ALIGNMENT * world_size`` elements
            later, so that its rows are even; the last one may then be empty.
        numel: of the buffer, a multiple of ``world_size``.

    Attributes:
        all: the stripes, including empty ones.
        is_stock: a shard has the same elements as DeepSpeed's, in the same order.
    """

    def __init__(self, starts: Sequence[int], numel: int, rank: int, world_size: int) -> None:
        unit = ALIGNMENT * world_size
        bounds = [0, *(min(-(-start // unit) * unit, numel) for start in starts[1:]), numel]
        self.all: list[Stripe] = []
        offset = 0
        for first, last in pairwise(bounds):
            width = (last - first) // world_size
            self.all.append(Stripe(first, last, width, offset))
            offset += width
        self._rank, self._world_size = rank, world_size
        self._stock = [Stripe(0, numel, numel // world_size, 0)]
        self._own = {stock: _slices(self._stock if stock else self.all, rank) for stock in (False, True)}
        self.is_stock = world_size == 1 or sum(stripe.width > 0 for stripe in self.all) <= 1

    def __iter__(self) -> Iterator[Stripe]:
        return (stripe for stripe in self.all if stripe.width)

    def slices(self, stock: bool = False) -> list[ShardSlice]:
        """Return the elements of the flat buffer in this rank's shard; with ``stock``, in DeepSpeed's."""
        return self._own[stock]

    def slices_of(self, begin: int, end: int, stock: bool = False) -> list[ShardSlice]:
        """Return which of the elements ``begin`` to ``end``, counted from ``begin``, are in this rank's shard."""
        found, slices = [], self._own[stock]
        index = max(0, bisect_right(slices, begin, key=lambda own: own.start) - 1)
        while index < len(slices) and slices[index].start < end:
            own = slices[index]
            first, last = max(begin, own.start), min(end, own.stop)
            if first < last:
                found.append(ShardSlice(first - begin, last - begin, own.offset + first - own.start))
            index += 1
        return found

    def exchange(
        self,
        shard: torch.Tensor,
        to_stripes: bool,
        process_group: dist.ProcessGroup,
        counter: SentCounter,
        device: torch.device,
    ) -> torch.Tensor:
        """Convert this rank's shard from DeepSpeed's layout ``to_stripes``, or back. Collective, over ``device``.

        Only for rare use: its host work grows with the number of ranks.
        """
        from deepspeed import comm

        before, after = (self._stock, self.all) if to_stripes else (self.all, self._stock)
        own_before, own_after = self._own[to_stripes], self._own[not to_stripes]
        # Both lists are in the order of the flat buffer; what is exchanged with each rank keeps that order.
        sent = [list(_common(own_before, _slices(after, peer))) for peer in range(self._world_size)]
        received = [list(_common(own_after, _slices(before, peer))) for peer in range(self._world_size)]
        out = torch.cat([shard[begin:end] for pieces in sent for begin, end in pieces]).to(device)
        into = torch.empty_like(out)
        sizes_in, sizes_out = (tuple(sum(b - a for a, b in each) for each in pieces) for pieces in (received, sent))
        counter.add("all_to_all_single", out.nbytes, process_group)
        comm.all_to_all_single(into, out, sizes_in, sizes_out, group=process_group)
        into = into.to(shard.device)
        result, done = torch.empty_like(shard), 0
        for begin, end in (piece for pieces in received for piece in pieces):
            result[begin:end] = into[done : done + end - begin]
            done += end - begin
        return result


def _slices(stripes: Sequence[Stripe], rank: int) -> list[ShardSlice]:
    """Return the elements of the flat buffer in the shard of ``rank``."""
    return [
        ShardSlice(first + rank * width, first + (rank + 1) * width, offset)
        for first, _, width, offset in stripes
        if width
    ]


def _common(own: list[ShardSlice], other: list[ShardSlice]) -> Iterator[tuple[int, int]]:
    """Yield the places in the shard of ``own`` of elements that ``other`` has, too. Both ascend."""
    i = j = 0
    while i < len(own) and j < len(other):
        first, last = max(own[i].start, other[j].start), min(own[i].stop, other[j].stop)
        if first < last:
            yield own[i].offset + first - own[i].start, own[i].offset + last - own[i].start
        if own[i].stop <= other[j].stop:
            i += 1
        else:
            j += 1


class StripedLayout(ShardLayout):
    """Parameters at ``offsets`` of the flat buffer, ascending.

    Attributes:
        stripes: how the buffer is divided among the ranks, one stripe per bucket; set by :meth:`divide`.
    """

    stripes: Stripes

    def __init__(
        self, offsets: dict[nn.Parameter, int], stock_numel: int, process_group: dist.ProcessGroup, *common: Any
    ) -> None:
        super().__init__(process_group, list(offsets), *common)
        self.offsets, self.shard_numel = offsets, stock_numel

    def divide(self, buckets: Sequence[Sequence[nn.Parameter]]) -> list[StripePlacement]:
        starts = [0, *(self.offsets[params[0]] for params in buckets[1:])]
        self.stripes = Stripes(starts, self.world_size * self.shard_numel, self.rank, self.world_size)
        stripes = zip(self.stripes.all, buckets, strict=bool(buckets))
        return [StripePlacement(self, stripe, params, number == 0) for number, (stripe, params) in enumerate(stripes)]

    def slices(self, stock: bool = False) -> list[ShardSlice]:
        """Return the elements of the flat buffer in this rank's shard; with ``stock``, in DeepSpeed's shard."""
        return self.stripes.slices(stock)

    def shard_slices(self, param: nn.Parameter, stock: bool = False) -> list[ShardSlice]:
        begin = self.offsets[param]
        return self.stripes.slices_of(begin, begin + param.numel(), stock)

    def gather_shards(self, dtype: torch.dtype, device: torch.device, read: ReadShard) -> torch.Tensor:
        memory = torch.empty(self.world_size * self.shard_numel, dtype=dtype, device=device)
        for stripe in self.stripes:
            rows = stripe.rows(memory)
            read(rows[self.rank], stripe.offset)
            self.all_gather(rows).wait()
        return memory

    def gradient_in(self, memory: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
        return memory.narrow(0, self.offsets[param], zero3.full_numel(param))


class StripePlacement(RowPlacement):
    """The placement of the bucket that reduces ``stripe``.

    Attributes:
        first, last: bounds of the stripe in the flat buffer.
    """

    def __init__(self, layout: StripedLayout, stripe: Stripe, params: Sequence[nn.Parameter], is_lowest: bool) -> None:
        super().__init__(layout, stripe.offset, stripe.width, params)
        self._stripe = stripe
        self.first, self.last, self.is_empty = stripe.first, stripe.last, not stripe.width
        begin = 0 if is_lowest else layout.offsets[params[0]]
        self.head = stripe.first - begin
        begins = [layout.offsets[param] for param in params]
        ends = [begin, *(offset + param.numel() for offset, param in zip(begins, params, strict=True))]
        self._blanks = [offset - end for offset, end in zip(begins, ends, strict=False)]  # padding before each
        self._rest = stripe.last - ends[-1]

    def pack(
        self, gradients: Sequence[torch.Tensor | None], dtype: torch.dtype, above: torch.Tensor | None
    ) -> torch.Tensor:
        """Pack as in the flat buffer, up to the stripe's end; the stripe begins at a multiple of ``_ALIGNMENT``."""
        pieces = with_zeros(self.order, gradients, dtype)
        if len(pieces) == 1 and len(pieces[0]) == self._layout.world_size * self.width and not self.head:
            return pieces[0]  # it has the matrix's memory layout
        device = self._layout.params[0].device
        unaligned, rest = -self.head % _ALIGNMENT, self._rest - (0 if above is None else len(above))
        blank = torch.zeros(max(unaligned, rest, *self._blanks), dtype=dtype, device=device)
        packed = [blank[:unaligned], *pieces, blank[:rest]]
        if any(self._blanks):
            before = [blank[:blanks] for blanks in self._blanks]
            packed[1:-1] = [each for pair in zip(before, pieces, strict=True) for each in pair]
        if above is not None:
            packed.append(above)
        return torch.cat(packed)[unaligned:]

    def give(self, flat: torch.Tensor, shard: torch.Tensor, tag: int, label: str) -> InFlight:
        """Launch the all-gather of the stripe into ``flat``, from this rank's updated ``shard``. Collective."""
        rows = self._stripe.rows(flat)
        rows[self._layout.rank].copy_(shard[self.offset : self.offset + self.width], non_blocking=True)
        return self._layout.all_gather(rows, tag, label)


FlatLayout = StripedLayout | OwnedLayout


class FlatShards(GradientShards):
    """Gradient shards in DeepSpeed's ``averaged_gradients``."""

    layouts: list[FlatLayout]

    def _read_layouts(self) -> list[FlatLayout]:
        zero12.leave_graphs(self.optimizer)
        self.groups = zero12.flat_groups(self.optimizer)
        divisor = zero12.averaging_divisor(self.optimizer)
        in_order = [
            dict(sorted(zip(group.params, group.offsets, strict=True), key=lambda pair: pair[1]))
            for group in self.groups
        ]
        owners = self._choose_owners(in_order) if self.whole else None
        layouts: list[FlatLayout] = []
        for group, offsets in zip(self.groups, in_order, strict=True):
            nodes = self.topology.of(group.process_group)
            common = (group.process_group, divisor, self.dtype, nodes, self.counter, group.index)
            if owners is None:
                layouts.append(StripedLayout(offsets, group.shard_numel, *common))
            else:
                layouts.append(OwnedLayout(offsets, owners, *common))
        return layouts

    def _choose_owners(self, in_order: list[dict[nn.Parameter, int]]) -> dict[nn.Parameter, int]:
        by_group: dict[dist.ProcessGroup, list[nn.Parameter]] = {}
        for group, params in zip(self.groups, in_order, strict=True):
            by_group.setdefault(group.process_group, []).extend(params)
        owners: dict[nn.Parameter, int] = {}
        for process_group, params_of_group in by_group.items():
            chosen = choose_owners((param.shape for param in params_of_group), process_group)
            owners |= zip(params_of_group, chosen, strict=True)
        return owners

    def make_buckets(self, config: ZeroSyncConfig, limit: int, common: dict[str, Any]) -> list[GradientBucket]:
        if why := why_stock(self.optimizer):
            if config.gradients.device is not None:
                raise ValueError(
                    "ZeroSync options 'coalesce=False' and 'grad_memory_budget' reduce gradients in parts, for which"
                    f" the shards of stages 1 and 2 must be laid out anew, and {why}. Leave them out, or use stage 3."
                )
            limit = sys.maxsize  # one bucket, and so one stripe, which is DeepSpeed's own layout
        return super().make_buckets(config, limit, common)

    def allocate(self) -> None:
        for layout in self.layouts:
            device = zero12.flat_parameters(self.optimizer, layout.group_index).device
            flat = self.local.empty(layout.shard_numel, self.local.dtype, device)
            zero12.give_gradient_shard(self.optimizer, layout.group_index, flat)

    def parts(self, layout: FlatLayout, offset: int, numel: int) -> list[torch.Tensor]:
        return [zero12.gradient_shard(self.optimizer, layout.group_index).narrow(0, offset, numel)]

    def hand_over(self) -> None:
        zero12.hand_over_gradients(self.optimizer)

    @property
    def computes_norm(self) -> bool:
        return zero.computes_norm(self.optimizer)

    def norm(self, said: torch.Tensor) -> torch.Tensor:
        return zero12.norm_of_shards(self.optimizer, map(self._counted, self.layouts), said, self.sum_over_ranks)

    def _counted(self, layout: FlatLayout) -> list[torch.Tensor]:
        """Return the parts of this rank's gradient shard that it counts in the norm of all gradients."""
        shard = zero12.gradient_shard(self.optimizer, layout.group_index)
        counted = zero12.counted_in_norm(self.optimizer, layout.params)
        if counted is layout.params:
            return [shard]
        return [own.of(shard) for param in counted for own in layout.shard_slices(param)] or [shard[:0]]

    def discard(self) -> None:
        for layout in self.layouts:
            zero12.give_gradient_shard(self.optimizer, layout.group_index, None)

    def parameters_floor(self) -> dict[nn.Parameter, Sent]:
        return {
            param: self.topology.sent(param.numel() * param.element_size(), layout.process_group)
            for layout in self.layouts
            for param in layout.params
        }


def why_stock(optimizer: ZeroOptimizer) -> str:
    """Return why each shard must be one piece, as in DeepSpeed's layout; an empty string if it need not be."""
    module = type(optimizer.optimizer).__module__.partition(".")[0]
    if module in _BLOCKWISE:
        return f"the optimizer {type(optimizer.optimizer).__name__} keeps its states by blocks of elements"
    return ""


_BLOCKWISE = frozenset({"bitsandbytes", "torchao"})  # packages whose optimizers have 8-bit or 4-bit states
