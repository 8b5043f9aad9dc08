"""Buckets of stages 1 and 2: gradients lie in memory of the layout's own order, so that nothing is packed.

When autograd completes a gradient for the first time in a window, it is copied once into its place, and ``param.grad``
is a view of that place from then on (as DDP's ``gradient_as_bucket_view``). A bucket of all gradients of a layout is
the matrix of all shards itself. Any other one has each owner's part in one piece, in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from zerosync_strategy.core.comm.collectives import Owners
from zerosync_strategy.core.gradients.buckets import Bucket, Chunk
from zerosync_strategy.core.gradients.layout import FlatLayout


@dataclass(frozen=True)
class _Piece:
    """What one reduction sends of a bucket with owners: elements ``first`` to ``last``. See :class:`Chunk`."""

    first: int
    last: int
    owners: Owners
    target: list[tuple[int, int]]


class FlatBucket(Bucket):
    """A bucket of one flat layout. See :class:`Bucket`."""

    layout: FlatLayout

    def _place(self) -> None:
        layout = self.layout
        self._memory: torch.Tensor | None = None
        self._allocation: Any = None
        self._views: dict[int, torch.Tensor] = {}  # by id of the parameter, of what is in its place
        self._begins: dict[Any, int] = {}  # of each parameter in the memory
        self._blanks: list[tuple[int, int]] = []
        self._pieces: list[_Piece] | None = None
        by_offset = sorted(self.params, key=layout.offsets.__getitem__)
        if len(self.params) == len(layout.params):
            self._begins = {param: layout.offsets[param] for param in by_offset}
            self._numel = layout.world_size * layout.shard_numel
            self.target = [(0, layout.shard_numel)]
            self.evenly_sharded = True
        else:
            self._place_by_owner(by_offset)
        end = 0
        for param in by_offset:
            if self._begins[param] > end:
                self._blanks.append((end, self._begins[param]))
            end = self._begins[param] + param.numel()
        if end < self._numel:
            self._blanks.append((end, self._numel))

    def _place_by_owner(self, by_offset: list[Any]) -> None:
        layout, end = self.layout, 0
        sizes: dict[int, int] = {}
        self.target = []
        for param in by_offset:
            self._begins[param] = end
            end += param.numel()
            offset, stop = layout.offsets[param], layout.offsets[param] + param.numel()
            while offset < stop:
                owner, column = divmod(offset, layout.shard_numel)
                size = min(stop - offset, layout.shard_numel - column)
                sizes[owner] = sizes.get(owner, 0) + size
                if owner == layout.rank:
                    if self.target and sum(self.target[-1]) == column:
                        column, before = self.target.pop()
                        self.target.append((column, before + size))
                    else:
                        self.target.append((column, size))
                offset += size
        self._numel = -(-end // layout.world_size) * layout.world_size
        self._pieces = list(self._cut(Owners(sizes, layout.rank, layout.world_size, self._numel)))
        self.evenly_sharded = len(sizes) == layout.world_size and max(sizes.values()) * len(sizes) <= 1.25 * end

    def _cut(self, owners: Owners) -> Iterator[_Piece]:
        size = self._chunk_width * self.layout.world_size
        for first in range(0, self._numel, size):
            last = min(first + size, self._numel)
            of_piece = owners.between(first, last)
            target = _part_of(self.target, owners.own_elements_before(first), of_piece.own_size)
            yield _Piece(first, last, of_piece, target)

    def collect(self, param: Any) -> None:
        gradient, view = param.grad, self._views.get(id(param))
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
        if before != 1.0:
            memory.mul_(before)
        if self._pieces is None:
            rows = memory.view(self.layout.world_size, self.layout.shard_numel)
            yield from self._columns(rows, 0, self._chunk_width)
            return
        for piece in self._pieces:
            part = memory[piece.first : piece.last].to(self.layout.dtype)
            yield Chunk(part, piece.owners, piece.target)

    def drop(self) -> None:
        if self._memory is not None:
            self.local.count(-self._memory.nbytes)
        self._memory = self._allocation = None
        self._views.clear()
        for param in self.params:
            param.grad = None

    def _complete(self) -> torch.Tensor:
        """Return the memory with every gradient in its place, on the reduction stream."""
        for param in self.params:
            gradient, view = param.grad, self._views.get(id(param))
            if gradient is view and view is not None:
                continue
            if gradient is None or self.local.converts:
                if view is None or not self.local.converts:
                    self._place_of(param).zero_()
            else:  # the program's own
                self.streams.record_stream_for_reduction(gradient)
                self._place_of(param).copy_(gradient)
        assert self._memory is not None
        self.streams.record_stream_for_reduction(self._memory)
        return self._memory

    def _place_of(self, param: Any) -> torch.Tensor:
        if self._memory is None:
            self._memory = torch.empty(self._numel, dtype=self.dtype, device=param.device)
            self.local.count(self._memory.nbytes)
            for begin, end in self._blanks:
                self._memory[begin:end].zero_()
            self._allocation = self.streams.record_allocation()
        else:
            self.streams.wait_for_allocation(self._memory, self._allocation)
        begin = self._begins[param]
        view = self._views[id(param)] = self._memory[begin : begin + param.numel()].view(param.shape)
        return view


def merge_deferred(
    by_layout: Iterable[list[FlatBucket]], make: Callable[[FlatLayout, list[Any], bool], FlatBucket]
) -> list[FlatBucket]:
    """Make one bucket of those that are deferred in a layout, unless they are spread evenly over the ranks.

    Args:
        by_layout: the buckets of each layout.
        make: of a layout, its parameters, and whether they are deferred.
    """
    by_layout = list(by_layout)
    merged = []
    for buckets in by_layout:
        apart = [bucket for bucket in buckets if bucket.deferred]
        if not all(bucket.evenly_sharded for bucket in apart):
            layout, params = apart[0].layout, {param for bucket in apart for param in bucket.params}
            whole = make(layout, [param for param in layout.params if param in params], True)
            if len(by_layout) == 1:
                whole.evenly_sharded = False  # complete at the end of a backward only, it would overlap nothing
            buckets = [*(bucket for bucket in buckets if not bucket.deferred), whole]
        merged += buckets
    return merged


def _part_of(ranges: list[tuple[int, int]], skip: int, size: int) -> list[tuple[int, int]]:
    """Return the ranges of ``size`` elements of ``ranges``, ``(offset, elements)``, after the first ``skip``."""
    found = []
    for offset, numel in ranges:
        first, last = max(0, skip), min(numel, skip + size)
        if first < last:
            found.append((offset + first, last - first))
        skip -= numel
    return found
