"""Buckets of stages 1 and 2: gradients lie in memory of the flat buffer's own order, so that nothing is packed.

When autograd completes a gradient for the first time in a window, it is copied once into its place, and ``param.grad``
is a view of that place from then on (as DDP's ``gradient_as_bucket_view``). A bucket sends one stripe. That begins a
few elements after the bucket's first parameter, so that its rows are even: these elements, the bucket's *head*, go to
the bucket below, at the end of whose memory there is room for them. A bucket is always reduced after the one above it,
as backward completes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from zerosync_strategy.core.comm.host_memory import HostMemory
from zerosync_strategy.core.gradients.buckets import Bucket, Chunk
from zerosync_strategy.core.gradients.layout import FlatLayout

_ALIGNMENT = 32  # elements: where a stripe begins in the memory of its bucket


class FlatBucket(Bucket):
    """A bucket of one flat layout. See :class:`Bucket`.

    Args:
        common, named: as for :class:`Bucket`.
        index: of its stripe.
        below: the bucket of the parameters before, if there is one.
        host_memory: where the gradients are, if the device is the CPU.
    """

    layout: FlatLayout

    def __init__(
        self, *common: Any, index: int, below: FlatBucket | None, host_memory: HostMemory, **named: Any
    ) -> None:
        super().__init__(*common, **named)
        self._host_memory = host_memory
        layout, params = self.layout, self.params
        self._stripe = stripe = layout.stripes.all[index]
        self._below = below
        self._memory: torch.Tensor | None = None
        self._allocation: Any = None
        # By id of the parameter, of what is in its place.
        self._views: dict[int, torch.Tensor | None] = dict.fromkeys(map(id, params))
        self._from_above: torch.Tensor | None = None  # the head of the bucket above, for the end of the memory
        begin = 0 if below is None else layout.offsets[params[0]]
        # The memory has the flat buffer's elements from `origin` up to the end of the stripe.
        self._head = stripe.first - begin
        origin = begin - -self._head % _ALIGNMENT
        self._numel = stripe.last - origin
        begins = {param: layout.offsets[param] - origin for param in params}
        self._begins = {id(param): begin for param, begin in begins.items()}
        self._blanks: list[tuple[int, int]] = []
        end = begin - origin
        for param, offset in begins.items():
            if offset > end:
                self._blanks.append((end, offset))
            end = offset + param.numel()
        self._end = end
        self._first = stripe.first - origin
        self.target = (stripe.offset, stripe.width)

    def collect(self, param: Any) -> None:
        gradient, view = param.grad, self._views[id(param)]
        if gradient is view or gradient is None:
            return
        source = gradient.detach() if gradient.requires_grad else gradient
        if self.local.converts and view is not None:
            view.add_(source)
        else:
            view = self._place_of(param).copy_(source)
        if self.local.converts:
            param.grad = None
        elif not gradient.requires_grad:  # else the program may go on to differentiate it
            param.grad = view

    def add(self, param: Any, gradient: torch.Tensor) -> None:
        if param.grad is not None or self.local.converts:
            super().add(param, gradient)
        else:
            param.grad = self._place_of(param).copy_(gradient)

    def chunks(self, before: float) -> Iterator[Chunk]:
        memory = self._complete()
        if self._head and self._below is not None:
            self._below.take_head(memory[self._first - self._head : self._first])
        if not self._stripe.width:
            return
        if before != 1.0:
            memory.mul_(before)
        rows = memory[self._first :].view(-1, self._stripe.width)
        yield from self._columns(rows, self._stripe.offset, self._chunk_width)

    def take_head(self, head: torch.Tensor) -> None:
        """Reduce also ``head``, the first elements of the bucket above, on whose reduction this one follows."""
        self._from_above = head.clone() if self._from_above is None else self._from_above.add_(head)
        self.needs_reduce = True

    def drop(self) -> None:
        if self._memory is not None:
            self.local.count(-self._memory.nbytes)
        self._memory = self._allocation = self._from_above = None
        self._views = dict.fromkeys(self._views)
        for param in self.params:
            param.grad = None

    def _complete(self) -> torch.Tensor:
        """Return the memory with every gradient in its place, on the reduction stream."""
        for param in self.params:
            gradient, view = param.grad, self._views[id(param)]
            if gradient is view and view is not None:
                continue
            if gradient is None or self.local.converts:
                if view is None or not self.local.converts:
                    self._place_of(param).zero_()
            else:  # the program's own
                self.streams.record_stream_for_reduction(gradient)
                self._place_of(param).copy_(gradient)
        memory = self._memory
        assert memory is not None
        self.streams.record_stream_for_reduction(memory)
        if self._end < self._numel:
            above = self._from_above
            if above is None:
                memory[self._end :].zero_()
            else:
                memory[self._numel - len(above) :].copy_(above)
                memory[self._end : self._numel - len(above)].zero_()
        return memory

    def _place_of(self, param: Any) -> torch.Tensor:
        if self._memory is None:
            self._memory = self._host_memory.empty(self._numel, self.dtype, param.device)
            self.local.count(self._memory.nbytes)
            for begin, end in self._blanks:
                self._memory[begin:end].zero_()
            self._allocation = self.streams.record_allocation()
        else:
            self.streams.wait_for_allocation(self._memory, self._allocation)
        key = id(param)
        begin = self._begins[key]
        view = self._views[key] = self._memory[begin : begin + param.numel()].view(param.shape)
        return view
