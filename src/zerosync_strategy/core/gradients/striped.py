"""The layout of ZeRO-1 and 2: a group's parameters lie in one flat buffer, which is cut into stripes.

A bucket sends one stripe (``comm/stripes.py``). That begins a few elements after the bucket's first parameter, so that
its rows are even: these elements, the bucket's *head*, go to the bucket below, at the end of whose memory there is room
for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zerosync_strategy.core.comm.collectives import InFlight
from zerosync_strategy.core.comm.stripes import ShardSlice, Stripe, Stripes
from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.gradients.placement import Read, RowPlacement, ShardLayout, with_zeros

_ALIGNMENT = 32  # elements: where a stripe begins in the memory of its bucket


class StripedLayout(ShardLayout):
    """Parameters of which each begins at its offset of the flat buffer; ascending.

    Attributes:
        stripes: how the buffer is divided among the ranks, one for each bucket; since :meth:`divide`.
    """

    stripes: Stripes

    def __init__(self, offsets: dict[Any, int], stock_numel: int, process_group: Any, *common: Any) -> None:
        super().__init__(process_group, list(offsets), *common)
        self.offsets, self.shard_numel = offsets, stock_numel

    def divide(self, buckets: Sequence[Sequence[Any]]) -> list[StripePlacement]:
        starts = [0, *(self.offsets[params[0]] for params in buckets[1:])]
        self.stripes = Stripes(starts, self.world_size * self.shard_numel, self.rank, self.world_size)
        stripes = zip(self.stripes.all, buckets, strict=bool(buckets))
        return [StripePlacement(self, stripe, params, number == 0) for number, (stripe, params) in enumerate(stripes)]

    def slices(self, stock: bool = False) -> list[ShardSlice]:
        """Return which elements of the flat buffer are in this rank's shard, or in DeepSpeed's with ``stock``."""
        return self.stripes.slices(stock)

    def shard_slices(self, param: Any, stock: bool = False) -> list[ShardSlice]:
        begin = self.offsets[param]
        return self.stripes.slices_of(begin, begin + param.numel(), stock)

    def gather_shards(self, dtype: torch.dtype, device: torch.device, read: Read) -> torch.Tensor:
        memory = torch.empty(self.world_size * self.shard_numel, dtype=dtype, device=device)
        for stripe in self.stripes:
            rows = stripe.rows(memory)
            read(rows[self.rank], stripe.offset)
            self.all_gather(rows).wait()
        return memory

    def gradient_in(self, memory: torch.Tensor, param: Any) -> torch.Tensor:
        return memory.narrow(0, self.offsets[param], zero3.full_numel(param))


class StripePlacement(RowPlacement):
    """Of the bucket that reduces ``stripe``.

    Attributes:
        first, last: elements of the flat buffer.
    """

    def __init__(self, layout: StripedLayout, stripe: Stripe, params: Sequence[Any], is_lowest: bool) -> None:
        super().__init__(layout, stripe.offset, stripe.width, params)
        self._stripe = stripe
        self.first, self.last, self.is_empty = stripe.first, stripe.last, not stripe.width
        begin = 0 if is_lowest else layout.offsets[params[0]]
        self.head = stripe.first - begin
        begins = [layout.offsets[param] for param in params]
        ends = [begin, *(offset + param.numel() for offset, param in zip(begins, params, strict=True))]
        self._blanks = [offset - end for offset, end in zip(begins, ends, strict=False)]  # before each
        self._rest = stripe.last - ends[-1]

    def pack(
        self, gradients: Sequence[torch.Tensor | None], dtype: torch.dtype, above: torch.Tensor | None
    ) -> torch.Tensor:
        """As the flat buffer has them, up to the stripe's end; the stripe begins at a multiple of some elements."""
        pieces = with_zeros(self.order, gradients, dtype)
        if self._is_packed(pieces) and not self.head:
            return pieces[0]
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
        """Begin to give the parameters of this rank's ``shard`` to all ranks, in their flat buffer. Collective."""
        rows = self._stripe.rows(flat)
        rows[self._layout.rank].copy_(shard[self.offset : self.offset + self.width], non_blocking=True)
        return self._layout.all_gather(rows, tag, label)
