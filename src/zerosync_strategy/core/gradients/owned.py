"""Gradients of an optimizer that needs whole parameters: each is in the shard of one rank, the parameter's owner.

A rank's shard has the gradients of the parameters that it owns, one after the other, so that shards differ in size. In
the memory that a bucket reduces, gradients are in the order of their owners, and each owner's part is reduced to it.
After the step of ZeRO-1 and 2, owners give their parameters to all ranks, in the flat buffer, whose layout stays
DeepSpeed's.

Of several nodes, owners of one place follow each other in that order: what a rank sends to another one of its node, and
its own node shard, are each one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from zerosync_strategy.core.comm.collectives import Allocate, InFlight
from zerosync_strategy.core.comm.nodes import Nodes
from zerosync_strategy.core.comm.owners import choose_owners, give_from_owners, reduce_to_owners
from zerosync_strategy.core.comm.stripes import ShardSlice, Stripe
from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.gradients.buckets import GradientBucket, Level, Part, ReduceScatterInput
from zerosync_strategy.core.gradients.flat import FlatBucket, FlatLayout
from zerosync_strategy.core.gradients.reducer import StepSlices
from zerosync_strategy.core.gradients.stage12 import Stage12Reducer


class OwnedLayout(FlatLayout):
    """As :class:`FlatLayout`; parameter ``p`` is on the shard of rank ``owners[p]`` alone.

    Attributes:
        own_offsets: where the parameters that this rank owns begin in its shard, ascending.
    """

    def __init__(
        self, process_group: Any, params: Sequence[Any], offsets: Sequence[int], owners: Mapping[Any, int],
        divisor: float, dtype: torch.dtype, group_index: int,
    ) -> None:  # fmt: skip
        super().__init__(process_group, params, offsets, 0, divisor, dtype, group_index)
        self.owners = {param: owners[param] for param in self.params}
        self.own_offsets: dict[Any, int] = {}
        for param, owner in self.owners.items():
            if owner == self.rank:
                self.own_offsets[param] = self.shard_numel
                self.shard_numel += zero3.full_numel(param)
        self._numel = max((offset + zero3.full_numel(param) for param, offset in self.offsets.items()), default=0)

    def divide(self, buckets: Sequence[tuple[list[Any], Level]], **common: Any) -> None:
        self.buckets = []
        firsts = [self.offsets[params[0]] for params, _ in buckets] + [self._numel]
        for (params, level), first, last in zip(buckets, firsts, firsts[1:], strict=False):
            offset, width = self.own_part(params)
            self.buckets.append(
                OwnedBucket(self, params, level, stripe=Stripe(first, last, width, offset), below=None, **common)
            )

    @property
    def is_stock(self) -> bool:
        return True

    def slices(self, stock: bool = False) -> list[ShardSlice]:
        begins = ((self.offsets[param], param.numel(), own) for param, own in self.own_offsets.items())
        return [ShardSlice(begin, begin + numel, own) for begin, numel, own in begins]

    def shard_slices(self, param: Any, stock: bool = False) -> list[ShardSlice]:
        own = self.own_offsets.get(param)
        return [] if own is None else [ShardSlice(0, zero3.full_numel(param), own)]

    def own_part(self, params: Sequence[Any]) -> tuple[int, int]:
        """Return where in this rank's shard those of ``params``, neighbours, begin that it owns, and their elements."""
        own = [param for param in params if param in self.own_offsets]
        return self.own_offsets[own[0]] if own else 0, sum(map(zero3.full_numel, own))

    def reduce_scatter(
        self, rows: Any, ordered: bool, tag: int, out: torch.Tensor | None, empty: Allocate, label: str
    ) -> InFlight:
        own = _row_of(self.rank, rows)
        return reduce_to_owners(rows, own, self.process_group, ordered, tag, out, empty, label)

    def in_node_shard(self, nbytes: int) -> int:
        largest, total = self._node_shard_numels
        return nbytes * largest // max(total, 1)

    @cached_property
    def _node_shard_numels(self) -> tuple[int, int]:
        """Elements of the largest node shard, and of all."""
        assert self.nodes is not None
        numels = [0] * self.nodes.size
        for param, owner in self.owners.items():
            numels[owner % self.nodes.size] += zero3.full_numel(param)
        return max(numels), sum(numels)

    def order_of(self, param: Any) -> tuple[int, int]:
        """Return by what the parameters of a bucket are sorted: their owners, of several nodes by place first."""
        owner = self.owners[param]
        return (owner, 0) if self.nodes is None else (owner % self.nodes.size, owner // self.nodes.size)

    def gather_shards(
        self, dtype: torch.dtype, device: torch.device, read: Callable[[torch.Tensor, int], None]
    ) -> torch.Tensor:
        memory = torch.empty(self._numel, dtype=dtype, device=device)
        for param, own in self.own_offsets.items():
            read(self.gradient_in(memory, param), own)
        for bucket in self.buckets:
            self.give(memory, bucket.params).wait()
        return memory

    def give(
        self, flat: torch.Tensor, params: Sequence[Any], tag: int = 0, label: str = "", origin: int = 0
    ) -> InFlight:
        """Begin to give every rank ``params``, neighbours, at least one, of which their owners have the values.
        Collective.

        ``flat`` is the flat buffer, or its elements from ``origin`` on.
        """
        runs: list[tuple[int, int, int]] = []
        for param in params:
            owner, begin = self.owners[param], self.offsets[param] - origin
            end = begin + zero3.full_numel(param)
            if runs and runs[-1][0] == owner and runs[-1][2] == begin:
                begin = runs.pop()[1]
            runs.append((owner, begin, end))
        parts = [(owner, flat[begin:end]) for owner, begin, end in runs]
        return give_from_owners(parts, self.process_group, tag, label, self.nodes)

    # ---- checkpoints, in DeepSpeed's own layout --------------------------------------------------------------------

    def to_stock(self, shard: torch.Tensor, flat_numel: int, device: torch.device) -> torch.Tensor:
        """Return the shard that DeepSpeed would give this rank of what owners have in theirs. Collective.

        The flat buffer has ``flat_numel`` elements with its padding, which has zeros; the process group sends from
        ``device``.
        """
        stock = torch.zeros(flat_numel // self.world_size, dtype=shard.dtype, device=shard.device)
        for bucket in self.buckets:
            first, last = bucket.stripe.first, bucket.stripe.last
            memory = torch.zeros(last - first, dtype=shard.dtype, device=device)
            for param in bucket.params:
                if param in self.own_offsets:
                    own = self.own_offsets[param]
                    begin = self.offsets[param] - first
                    memory[begin : begin + param.numel()] = shard[own : own + param.numel()]
            self.give(memory, bucket.params, origin=first).wait()
            begin, end = self._overlap(first, last, len(stock))
            stock[begin - self.rank * len(stock) : end - self.rank * len(stock)] = memory[begin - first : end - first]
        return stock

    def from_stock(self, stock: torch.Tensor, flat_numel: int, device: torch.device) -> torch.Tensor:
        """Return this rank's shard of what :meth:`to_stock` has returned; it may lack the padding. Collective."""
        shard = torch.empty(self.shard_numel, dtype=stock.dtype, device=device)
        stock_numel = flat_numel // self.world_size
        for bucket in self.buckets:
            first, last = bucket.stripe.first, bucket.stripe.last
            memory = torch.zeros(last - first, dtype=stock.dtype, device=device)
            begin, end = self._overlap(first, last, stock_numel)
            part = stock[begin - self.rank * stock_numel : end - self.rank * stock_numel]
            memory[begin - first : begin - first + len(part)] = part
            of: dict[int, list[torch.Tensor]] = {}
            for param in bucket.params:
                start = self.offsets[param] - first
                of.setdefault(self.owners[param], []).append(memory[start : start + param.numel()])
            rows = {owner: torch.cat(parts) for owner, parts in of.items()}
            empty: Allocate = lambda numel, dtype, device: torch.empty(numel, dtype=dtype, device=device)  # noqa: E731
            reduction = self.reduce_scatter(rows, False, 0, None, empty, "the exchange of master weights")
            shard[bucket.stripe.offset : bucket.stripe.offset + bucket.stripe.width] = reduction.wait()
        return shard

    def _overlap(self, first: int, last: int, stock_numel: int) -> tuple[int, int]:
        """Return which of the elements from ``first`` to ``last`` DeepSpeed would give this rank; may be none."""
        begin = min(max(first, self.rank * stock_numel), last)
        return begin, max(begin, min(last, (self.rank + 1) * stock_numel))


def _row_of(number: int, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return one of ``rows``; else a tensor without elements, which keeps none of their memory."""
    return rows[number] if number in rows else next(iter(rows.values())).new_empty(0)


_Spans = dict[int, tuple[int, int]]
"""Where rows begin and end in the memory of a bucket."""


def _rows_in(memory: torch.Tensor, first: int, spans: _Spans) -> dict[int, torch.Tensor]:
    """Return what ``memory`` has of each row; it has the bucket's from ``first`` on."""
    last = first + len(memory)
    cut = ((key, max(begin, first), min(end, last)) for key, (begin, end) in spans.items())
    return {key: memory[begin - first : end - first] for key, begin, end in cut if begin < end}


class ToOwners(GradientBucket):
    """A bucket of an :class:`OwnedLayout`, which reduces memory with the gradients in the order of their owners."""

    layout: OwnedLayout

    def _lay_out_by_owner(self) -> dict[Any, int]:
        """Choose where in the memory each gradient begins; returns it, ascending."""
        nodes = self.layout.nodes
        self._rows: _Spans = {}  # by owner
        self._places: _Spans = {}  # by the place of the owner
        self._own_place: _Spans = {}  # by node, those of this rank's place
        begins: dict[Any, int] = {}
        end = 0

        def lengthen(spans: _Spans, key: int, begin: int) -> None:
            spans[key] = spans.get(key, (begin, 0))[0], end

        for param in sorted(self.params, key=self.layout.order_of):
            owner, begin, end = self.layout.owners[param], end, end + zero3.full_numel(param)
            begins[param] = begin
            lengthen(self._rows, owner, begin)
            if nodes is not None:
                node, place = divmod(owner, nodes.size)
                lengthen(self._places, place, begin)
                if place == nodes.place:
                    lengthen(self._own_place, node, begin)
        return begins

    def _by_owner(self, memory: torch.Tensor) -> Iterator[ReduceScatterInput]:
        """Yield ``memory``, in chunks, by the owners of what it has."""
        numel = self._chunk_width * self.layout.world_size
        spans = self._rows if self.nodes is None else self._places
        offset, width = self.target
        own = self._rows.get(self.layout.rank, (0, 0))[0]
        for first in range(0, len(memory), numel):
            chunk = memory[first : first + numel].to(self.layout.dtype)
            begin, end = (min(max(bound - own, 0), width) for bound in (first, first + len(chunk)))
            yield ReduceScatterInput(_rows_in(chunk, first, spans), Part(offset + begin, end - begin, first))

    def reduce_within(self, nodes: Nodes, rows: Mapping[int, torch.Tensor], ordered: bool, tag: int) -> InFlight:
        own = _row_of(nodes.place, rows)
        group, ranks = nodes.ranks_within(own.device)
        reduction = reduce_to_owners(rows, own, group, ordered, tag, None, self.local.empty, self.label, ranks)
        if self.layout.is_native:  # where it may lie in the memory of the whole bucket
            reduction.then(torch.clone)
        return reduction

    def reduce_between(
        self, nodes: Nodes, part: Part, sums: torch.Tensor, ordered: bool, tag: int, out: torch.Tensor | None
    ) -> InFlight:
        first = max(part.begin, self._places.get(nodes.place, (0, 0))[0])
        rows = _rows_in(sums, first, self._own_place)
        own = rows.get(nodes.node, sums[:0])
        sent = {node: row.to(self.layout.dtype) for node, row in rows.items()}
        group, ranks = nodes.ranks_between(sums.device)
        return reduce_to_owners(sent, own, group, ordered, tag, out, self.local.empty, self.label, ranks)


class OwnedBucket(ToOwners, FlatBucket):
    """A bucket of stage 1 or 2."""

    layout: OwnedLayout

    def _lay_out(self) -> None:
        self._head = self._first = 0
        self._blanks = []
        begins = self._lay_out_by_owner()
        self._begins = {gradient: begins[gradient.param] for gradient in self.gradients}
        self._numel = self._end = sum(param.numel() for param in self.params)

    @property
    def is_empty(self) -> bool:
        return False

    def reduce_scatter_inputs(self, factor: float) -> Iterator[ReduceScatterInput]:
        memory = self._complete()
        if factor != 1.0:
            memory.mul_(factor)
        yield from self._by_owner(memory)

    def launch_gather(self, flat: torch.Tensor, shard: torch.Tensor, tag: int) -> None:
        for param in self.params:
            if param in self.layout.own_offsets:
                own = self.layout.own_offsets[param]
                self.layout.gradient_in(flat, param).copy_(shard[own : own + param.numel()], non_blocking=True)
        self.gather = self.layout.give(flat, self.params, tag, self.gather_label)


class OwnedReducer(Stage12Reducer):
    """Reduces each gradient to the rank that owns its parameter."""

    layouts: list[OwnedLayout]  # type: ignore[assignment]

    def _read_layouts(self) -> list[OwnedLayout]:  # type: ignore[override]
        layouts = super()._read_layouts()
        by_group: dict[Any, list[Any]] = {}
        for layout in layouts:
            by_group.setdefault(layout.process_group, []).extend(layout.params)
        owners: dict[Any, int] = {}
        groups = self.optimizer.optimizer.param_groups
        options = {param: groups[layout.group_index] for layout in layouts for param in layout.params}
        for process_group, params in by_group.items():
            described = [(param.shape, options[param]) for param in params]
            owners |= zip(params, choose_owners(described, self.step_cost, process_group), strict=True)
        return [self._owned(layout, owners) for layout in layouts]

    def _owned(self, layout: FlatLayout, owners: Mapping[Any, int]) -> OwnedLayout:
        params, offsets = layout.params, list(layout.offsets.values())
        return OwnedLayout(
            layout.process_group, params, offsets, owners, layout.divisor, layout.dtype, layout.group_index
        )

    def step_slices(self) -> StepSlices:
        return []
