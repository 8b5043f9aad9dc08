"""ZeRO-1 and 2: each group's gradients are one flat buffer, cut into stripes, and a bucket has one of them.

The local gradients of a bucket lie in memory of the flat buffer's own order, so that nothing is packed. A gradient is
copied once in a window into its place, and ``param.grad`` is a view of that place from then on (as DDP's
``gradient_as_bucket_view``). A bucket sends one stripe. That begins a few elements after the bucket's first parameter,
so that its rows are even: these elements, the bucket's *head*, go to the bucket below, at the end of whose memory there
is room for them. A bucket is always reduced after the one above it, as backward completes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zerosync_strategy.core.comm.collectives import InFlight
from zerosync_strategy.core.comm.stripes import ShardSlice, Stripe, Stripes
from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.gradients.buckets import GradientBucket, Level, ReduceScatterInput, ShardLayout
from zerosync_strategy.core.gradients.local import LocalGradient

_ALIGNMENT = 32  # elements: where a stripe begins in the memory of its bucket


class FlatLayout(ShardLayout):
    """Parameter ``params[i]`` begins at ``offsets[i]`` of the flat buffer. The parameters are in that order.

    Attributes:
        group_index: DeepSpeed's index of the parameter group.
        stripes: how the buffer is divided among the ranks.
        buckets: that reduce it, one per stripe, in the order of the buffer. :meth:`divide` sets both.
    """

    stripes: Stripes
    buckets: list[FlatBucket]

    def __init__(
        self, process_group: Any, params: Sequence[Any], offsets: Sequence[int], shard_numel: int, divisor: float,
        dtype: torch.dtype, group_index: int,
    ) -> None:  # fmt: skip
        self.offsets = dict(sorted(zip(params, offsets, strict=True), key=lambda pair: pair[1]))
        super().__init__(process_group, list(self.offsets), shard_numel, divisor, dtype)
        self.group_index = group_index

    def divide(self, buckets: Sequence[tuple[list[Any], Level]], **common: Any) -> None:
        """Let a stripe begin with each of ``buckets``: its parameters, and their level; in their order."""
        starts = [0, *(self.offsets[params[0]] for params, _ in buckets[1:])]
        self.stripes = Stripes(starts, self.world_size * self.shard_numel, self.rank, self.world_size)
        self.buckets = []
        below = None
        for stripe, (params, level) in zip(self.stripes.all, buckets, strict=bool(buckets)):
            below = FlatBucket(self, params, level, stripe=stripe, below=below, **common)
            self.buckets.append(below)

    @property
    def is_stock(self) -> bool:
        """Whether a shard never has to be brought into DeepSpeed's own layout."""
        return self.stripes.is_stock

    def slices(self, stock: bool = False) -> list[ShardSlice]:
        """Return which elements of the flat buffer are in this rank's shard, or in DeepSpeed's with ``stock``."""
        return self.stripes.slices(stock)

    def matrices(self, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
        for stripe in self.stripes:
            yield stripe.rows(memory), stripe.offset

    def gradient_in(self, memory: torch.Tensor, param: Any) -> torch.Tensor:
        return memory.narrow(0, self.offsets[param], zero3.full_numel(param))

    def shard_slices(self, param: Any, stock: bool = False) -> list[ShardSlice]:
        """Return which parts of ``param`` this rank has by stripes, or in DeepSpeed's own layout with ``stock``."""
        begin = self.offsets[param]
        return self.stripes.slices_of(begin, begin + param.numel(), stock)

    def read(self, shard: torch.Tensor, param: Any, stock: bool = False) -> torch.Tensor:
        """Return ``param``'s elements of all ranks' shards, in its shape and in fp32. Collective."""
        from deepspeed import comm

        full = torch.zeros(zero3.full_numel(param), dtype=torch.float32, device=param.device)
        for own in self.shard_slices(param, stock):
            full[own.start : own.stop].copy_(own.of(shard))
        comm.all_reduce(full, group=self.process_group)
        return full.view(zero3.full_shape(param))

    def write(self, value: torch.Tensor, shard: torch.Tensor, param: Any, stock: bool = False) -> None:
        """Copy this rank's part of ``value``, of ``param``, into its shard."""
        flat = value.detach().reshape(-1)
        for own in self.shard_slices(param, stock):
            own.of(shard).copy_(flat[own.start : own.stop])


class FlatBucket(GradientBucket):
    """A bucket of one flat layout, which reduces ``stripe``. ``below`` is the bucket of the parameters before.

    Attributes:
        gather: of the parameters of the stripe, once this step has updated them; nobody has waited for it.
    """

    layout: FlatLayout

    def __init__(self, *common: Any, stripe: Stripe, below: FlatBucket | None, **named: Any) -> None:
        super().__init__(*common, **named)
        self.stripe = stripe
        self.gather: InFlight | None = None
        self.gather_label = f"the gather of the updated parameters {self.names}"
        self._below = below
        self._memory: torch.Tensor | None = None
        self._allocation: Any = None
        self._from_above: torch.Tensor | None = None  # the head of the bucket above, for the end of the memory
        self._lay_out()
        self.target = (stripe.offset, stripe.width)

    def _lay_out(self) -> None:
        """Choose where each gradient lies in the memory: it has the flat buffer's elements up to the stripe's end."""
        layout, params, stripe = self.layout, self.params, self.stripe
        begin = 0 if self._below is None else layout.offsets[params[0]]
        self._head = stripe.first - begin
        origin = begin - -self._head % _ALIGNMENT
        self._numel = stripe.last - origin
        begins = {param: layout.offsets[param] - origin for param in params}
        self._begins = dict(zip(self.gradients, begins.values(), strict=True))
        self._blanks: list[tuple[int, int]] = []
        end = begin - origin
        for param, offset in begins.items():
            if offset > end:
                self._blanks.append((end, offset))
            end = offset + param.numel()
        self._end = end
        self._first = stripe.first - origin

    @property
    def is_empty(self) -> bool:
        """Whether no rank has elements of it, so that it is neither reduced nor gathered."""
        return not self.stripe.width

    def launch_gather(self, flat: torch.Tensor, shard: torch.Tensor, tag: int) -> None:
        """Begin to give the parameters of this rank's ``shard`` to all ranks, in their flat buffer. Collective."""
        rows = self.stripe.rows(flat)
        rows[self.layout.rank].copy_(self.part_of(shard), non_blocking=True)
        self.gather = self.layout.all_gather(rows, tag, self.gather_label)

    def part_of(self, shard: torch.Tensor) -> torch.Tensor:
        return shard[self.stripe.offset : self.stripe.offset + self.stripe.width]

    def collect(self, gradient: LocalGradient) -> None:
        param, place = gradient.param, gradient.place
        found = param.grad
        if found is None and place is not None and self.local.converts:
            place.zero_()  # a hook has dropped it
        if found is place or found is None:
            return
        source = found.detach() if found.requires_grad else found
        if self.local.converts and place is not None:
            place.add_(source)
        else:
            place = self._place_of(gradient).copy_(source)
        if self.local.converts:
            param.grad = None
        elif not found.requires_grad:  # else the program may go on to differentiate it
            param.grad = place

    def add(self, gradient: LocalGradient, more: torch.Tensor) -> None:
        if gradient.param.grad is not None or self.local.converts:
            super().add(gradient, more)
        else:
            gradient.param.grad = self._place_of(gradient).copy_(more)

    def reduce_scatter_inputs(self, factor: float) -> Iterator[ReduceScatterInput]:
        memory = self._complete()
        if self._head and self._below is not None:
            self._below.take_head(memory[self._first - self._head : self._first])
        if self.is_empty:
            return
        if factor != 1.0:
            memory.mul_(factor)
        rows = memory[self._first :].view(-1, self.stripe.width)
        yield from self._by_columns(rows, self.stripe.offset, self._chunk_width)

    def take_head(self, head: torch.Tensor) -> None:
        """Reduce also ``head``, the first elements of the bucket above, on whose reduction this one follows."""
        self._from_above = head.clone() if self._from_above is None else self._from_above.add_(head)
        self.needs_reduce = True

    def _drop(self) -> None:
        if self._memory is not None:
            self.local.count(-self._memory.nbytes)
        self._memory = self._allocation = self._from_above = None
        for gradient in self.gradients:
            gradient.place = gradient.param.grad = None

    def _complete(self) -> torch.Tensor:
        """Return the memory with every gradient in its place, on the reduction stream."""
        for gradient in self.gradients:
            found, place = gradient.param.grad, gradient.place
            if found is place and place is not None:
                continue
            if found is None or self.local.converts:
                if place is None or not self.local.converts:
                    self._place_of(gradient).zero_()
            else:  # the program's own
                self.streams.record_stream_for_reduction(found)
                self._place_of(gradient).copy_(found)
        memory = self._memory
        assert memory is not None
        self._reads(memory)
        if self._end < self._numel:
            above = self._from_above
            if above is None:
                memory[self._end :].zero_()
            else:
                memory[self._numel - len(above) :].copy_(above)
                memory[self._end : self._numel - len(above)].zero_()
        return memory

    def _place_of(self, gradient: LocalGradient) -> torch.Tensor:
        param = gradient.param
        if self._memory is None:
            self._memory = self.local.empty(self._numel, self.dtype, param.device)
            self.local.count(self._memory.nbytes)
            for begin, end in self._blanks:
                self._memory[begin:end].zero_()
            self._allocation = self.streams.record_allocation()
        else:
            self.streams.wait_for_allocation(self._memory, self._allocation)
        begin = self._begins[gradient]
        gradient.place = place = self._memory[begin : begin + param.numel()].view(param.shape)
        return place
