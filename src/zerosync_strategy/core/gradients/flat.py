"""Buckets of ZeRO-1 and 2, whose local gradients lie in memory of their own.

That has the order in which they are reduced, so that nothing is packed. A gradient is copied once in a window into its
place, and ``param.grad`` is a view of that place from then on (as DDP's ``gradient_as_bucket_view``). A bucket is
reduced after the one above it, as backward completes them.
"""

from __future__ import annotations

from typing import Any

import torch

from zerosync_strategy.core.gradients.buckets import GradientBucket
from zerosync_strategy.core.gradients.local import LocalGradient
from zerosync_strategy.core.gradients.owned import OwnedPlacement
from zerosync_strategy.core.gradients.striped import StripePlacement


class FlatBucket(GradientBucket):
    """A bucket of one flat buffer. ``below`` is the bucket of the parameters before."""

    placement: StripePlacement | OwnedPlacement

    def __init__(self, *common: Any, below: FlatBucket | None, **named: Any) -> None:
        super().__init__(*common, **named)
        self._below = below
        # By gradient: the hash of a parameter is a call of Python's.
        self._begins = {gradient: self.placement.memory.begins[gradient.param] for gradient in self.gradients}
        self._memory: torch.Tensor | None = None
        self._allocation: Any = None
        self._from_above: torch.Tensor | None = None  # the head of the bucket above, for the end of the memory

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

    def _packed(self) -> torch.Tensor:
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
        memory, plan = self._memory, self.placement.memory
        assert memory is not None
        self._reads(memory)
        if plan.end < plan.numel:
            above = self._from_above
            if above is None:
                memory[plan.end :].zero_()
            else:
                memory[plan.numel - len(above) :].copy_(above)
                memory[plan.end : plan.numel - len(above)].zero_()
        if plan.head and self._below is not None:
            self._below.take_head(memory[plan.first - plan.head : plan.first])
        return memory[plan.first :]

    def _place_of(self, gradient: LocalGradient) -> torch.Tensor:
        param, plan = gradient.param, self.placement.memory
        if self._memory is None:
            self._memory = self.local.empty(plan.numel, self.dtype, param.device)
            self.local.count(self._memory.nbytes)
            for begin, end in plan.blanks:
                self._memory[begin:end].zero_()
            self._allocation = self.streams.record_allocation()
        else:
            self.streams.wait_for_allocation(self._memory, self._allocation)
        begin = self._begins[gradient]
        gradient.place = place = self._memory[begin : begin + param.numel()].view(param.shape)
        return place
