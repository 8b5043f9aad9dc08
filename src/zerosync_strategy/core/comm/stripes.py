"""Stripes: how a flat buffer is divided among ranks so that every part of it belongs to all of them alike.

ZeRO-1 and 2 give each rank one contiguous part of a group's flat buffer. The parameters that a backward completes first
then belong to the last rank alone, and reductions during the backward would use one link after the other. So the buffer
is divided into *stripes*, each a matrix with one row per rank: its reduction and its gather are even, native
collectives, in place. A rank's shard is its rows of all stripes, in order. One stripe alone is DeepSpeed's own layout.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from zerosync_strategy.core.comm.traffic import SentCounter

ALIGNMENT = 8
"""The width of each stripe but the last is a multiple of this many elements, because NCCL copies 16 bytes at a time."""


class ShardSlice(NamedTuple):
    """Elements ``start`` to ``stop`` of a flat tensor, at ``offset`` in this rank's shard; perhaps none."""

    start: int
    stop: int
    offset: int

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        return shard[self.offset : self.offset + self.stop - self.start]


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
        self, shard: torch.Tensor, to_stripes: bool, process_group: Any, counter: SentCounter, device: torch.device
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
