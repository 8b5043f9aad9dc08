"""Buckets of stages 1 and 2: gradients lie in memory of the layout's own order, so that nothing is packed.

When autograd completes a gradient for the first time in a window, it is copied once into its place, and ``param.grad``
is a view of that place from then on (as DDP's ``gradient_as_bucket_view``). A bucket of all gradients of a layout is
the matrix of all shards itself. Any other one has each owner's part in one piece, in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from zerosync_strategy.core.comm.collectives import Owners
from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.config import ZeroSyncConfig
from zerosync_strategy.core.gradients.buckets import Bucket, Chunk, choose_deferred, part_of, runs
from zerosync_strategy.core.gradients.layout import FlatLayout
from zerosync_strategy.core.gradients.local import LocalGradients, add_to_grad


class FlatBucket(Bucket):
    """A bucket of one flat layout. See :class:`Bucket`.

    Attributes:
        owners: which rank receives which part of it; ``None`` for the matrix of all shards.
    """

    layout: FlatLayout

    def __init__(
        self,
        layout: FlatLayout,
        params: Sequence[Any],
        deferred: bool,
        local: LocalGradients,
        streams: Streams,
        names: Mapping[Any, str],
    ) -> None:
        super().__init__(layout, params, deferred, local, streams, names)
        self._memory: torch.Tensor | None = None
        self._allocation: Any = None
        self._views: dict[int, torch.Tensor] = {}  # by id of the parameter, of what is in its place
        self._begins: dict[Any, int] = {}  # of each parameter in the memory
        self._blanks: list[tuple[int, int]] = []
        self.owners: Owners | None = None
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
        self.owners = Owners(sizes, layout.rank, layout.world_size, self._numel)
        self.evenly_sharded = len(sizes) == layout.world_size and max(sizes.values()) * len(sizes) <= 1.25 * end

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
            add_to_grad(param, gradient)
            return
        param.grad = self._place_of(param).copy_(gradient)

    def chunks(self, limit: int, before: float) -> Iterator[Chunk]:
        memory = self._complete()
        layout = self.layout
        if before != 1.0:
            memory.mul_(before)
        width = max(1, limit // (layout.world_size * layout.dtype.itemsize))
        if self.owners is None:
            rows = memory.view(layout.world_size, layout.shard_numel)
            for first in range(0, layout.shard_numel, width):
                columns = rows[:, first : first + width]
                yield Chunk(columns.to(layout.dtype), None, [(first, columns.shape[1])])
            return
        size = width * layout.world_size
        for first in range(0, self._numel, size):
            owners = self.owners.between(first, min(first + size, self._numel))
            skipped = self.owners.own_elements_before(first)
            target = part_of(self.target, skipped, owners.own_size)
            yield Chunk(memory[first : first + size].to(layout.dtype), owners, target)

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


def make_flat_buckets(
    layouts: Sequence[FlatLayout],
    local: LocalGradients,
    streams: Streams,
    config: ZeroSyncConfig,
    limit: int,
    names: Mapping[Any, str],
) -> list[FlatBucket]:
    """Return the buckets in the order in which backward is expected to complete them.

    Those that may be deferred are one bucket per layout, unless smaller ones are spread evenly over the ranks.

    Args:
        layouts: of all gradients, in the order of the parameters.
        local: knows the bytes of each gradient.
        streams: of the engine.
        config: says what may be deferred.
        limit: bytes of a bucket with several parameters.
        names: of the parameters, for profiles.
    """
    params = [param for layout in layouts for param in layout.params]
    nbytes = {param: local.nbytes(param) for param in params}
    deferred, limit = choose_deferred(params, local, config, limit)
    buckets = []
    for layout in reversed(layouts):
        made = [
            FlatBucket(layout, members, members[0] in deferred, local, streams, names)
            for members in runs(layout.params, nbytes, limit, deferred)
        ]
        if not all(bucket.evenly_sharded for bucket in made if bucket.deferred):
            merged = [param for param in layout.params if param in deferred]
            made = [bucket for bucket in made if not bucket.deferred]
            made.append(FlatBucket(layout, merged, True, local, streams, names))
            if len(layouts) == 1:
                made[-1].evenly_sharded = False  # complete at the end of a backward only, it would overlap nothing
        buckets += made
    return buckets
