"""The layout of an optimizer that needs whole parameters: each is in the shard of one rank, its owner.

A rank's shard has what the rank owns, one parameter after the other, so that shards differ in size. In the memory that
a bucket reduces, gradients are in the order of their owners, and each owner's part is reduced to it. After a step of
ZeRO-1 and 2, owners give their parameters to all ranks, in the flat buffer, whose layout stays DeepSpeed's. DeepSpeed's
own gradient shards have nothing.

Of several nodes, owners of one place follow each other in that order: what a rank sends to another one of its node, and
its own node shard, are each one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerosync_strategy.core.comm.collectives import InFlight, Summing
from zerosync_strategy.core.comm.nodes import Nodes
from zerosync_strategy.core.comm.owners import give_from_owners, reduce_to_owners
from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.gradients.layout import (
    Placement,
    ReadShard,
    ReduceScatterInput,
    Scaling,
    ShardLayout,
    ShardPart,
    ShardSlice,
    with_zeros,
)


class OwnedLayout(ShardLayout):
    """Parameter ``p`` begins at ``offsets[p]`` of a flat buffer, ascending, and is in the shard of rank ``owners[p]``.

    On stage 3, that buffer is what ``full_gradients()`` shows.

    Attributes:
        own_offsets: where the parameters that this rank owns begin in its shard, ascending.
    """

    def __init__(
        self,
        offsets: dict[nn.Parameter, int],
        owners: Mapping[nn.Parameter, int],
        process_group: dist.ProcessGroup,
        *common: Any,
    ) -> None:
        super().__init__(process_group, list(offsets), *common)
        self.offsets = offsets
        self.owners = {param: owners[param] for param in self.params}
        self.own_offsets: dict[nn.Parameter, int] = {}
        self.shard_numel = 0
        for param, owner in self.owners.items():
            if owner == self.rank:
                self.own_offsets[param] = self.shard_numel
                self.shard_numel += zero3.full_numel(param)
        self._buckets: list[OwnedPlacement] = []

    def divide(self, buckets: Sequence[Sequence[nn.Parameter]]) -> list[OwnedPlacement]:
        self._buckets = [OwnedPlacement(self, params) for params in buckets]
        return self._buckets

    def end_of(self, param: nn.Parameter) -> int:
        return self.offsets[param] + zero3.full_numel(param)

    def slices(self, stock: bool = False) -> list[ShardSlice]:
        """Return which elements of the flat buffer are in this rank's shard."""
        return [ShardSlice(self.offsets[param], self.end_of(param), own) for param, own in self.own_offsets.items()]

    def shard_slices(self, param: nn.Parameter, stock: bool = False) -> list[ShardSlice]:
        own = self.own_offsets.get(param)
        return [] if own is None else [ShardSlice(0, zero3.full_numel(param), own)]

    def own_part(self, params: Sequence[nn.Parameter]) -> tuple[int, int]:
        """Return where in this rank's shard those of ``params``, neighbours, begin that it owns, and their elements."""
        own = [param for param in params if param in self.own_offsets]
        return self.own_offsets[own[0]] if own else 0, sum(map(zero3.full_numel, own))

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

    def order_of(self, param: nn.Parameter) -> tuple[int, int]:
        """Return by what the parameters of a bucket are sorted: their owners, of several nodes by place first."""
        owner = self.owners[param]
        return (owner, 0) if self.nodes is None else (owner % self.nodes.size, owner // self.nodes.size)

    def gather_shards(self, dtype: torch.dtype, device: torch.device, read: ReadShard) -> torch.Tensor:
        memory = torch.empty(max(map(self.end_of, self.params), default=0), dtype=dtype, device=device)
        for param, own in self.own_offsets.items():
            read(self.gradient_in(memory, param), own)
        for bucket in self._buckets:
            self.give(memory, bucket.params).wait()
        return memory

    def gradient_in(self, memory: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
        return memory[self.offsets[param] : self.end_of(param)]

    def give(
        self, flat: torch.Tensor, params: Sequence[nn.Parameter], tag: int = 0, label: str = "", origin: int = 0
    ) -> InFlight:
        """Begin to give every rank ``params``, neighbours, at least one, of which their owners have the values.
        Collective.

        ``flat`` is the flat buffer, or its elements from ``origin`` on.
        """
        ranges: list[tuple[int, int, int]] = []
        for param in params:
            owner, begin = self.owners[param], self.offsets[param]
            if ranges and ranges[-1][0] == owner and ranges[-1][2] == begin:
                begin = ranges.pop()[1]
            ranges.append((owner, begin, self.end_of(param)))
        parts = [(owner, flat[begin - origin : end - origin]) for owner, begin, end in ranges]
        return give_from_owners(parts, self.process_group, self.counter, tag, label, self.nodes)

    # ---- checkpoints, in DeepSpeed's own layout --------------------------------------------------------------------

    def to_stock(self, shard: torch.Tensor, flat_numel: int, device: torch.device) -> torch.Tensor:
        """Return the shard that DeepSpeed would give this rank of what owners have in theirs. Collective.

        The flat buffer has ``flat_numel`` elements with its padding, which has zeros; the process group sends from
        ``device``.
        """
        stock = torch.zeros(flat_numel // self.world_size, dtype=shard.dtype, device=shard.device)
        for bucket in self._buckets:
            first, last = bucket.first, bucket.last
            memory = torch.zeros(last - first, dtype=shard.dtype, device=device)
            for param in bucket.own:
                begin = self.offsets[param] - first
                memory[begin : begin + param.numel()] = self._of(shard, param)
            self.give(memory, bucket.params, origin=first).wait()
            begin, end = self._overlap(first, last, len(stock))
            stock[begin - self.rank * len(stock) : end - self.rank * len(stock)] = memory[begin - first : end - first]
        return stock

    def from_stock(self, stock: torch.Tensor, flat_numel: int, device: torch.device) -> torch.Tensor:
        """Return this rank's shard of what :meth:`to_stock` has returned; it may lack the padding. Collective."""
        shard = torch.empty(self.shard_numel, dtype=stock.dtype, device=device)
        stock_numel = flat_numel // self.world_size
        for bucket in self._buckets:
            first, last = bucket.first, bucket.last
            memory = torch.zeros(last - first, dtype=stock.dtype, device=device)
            begin, end = self._overlap(first, last, stock_numel)
            part = stock[begin - self.rank * stock_numel : end - self.rank * stock_numel]
            memory[begin - first : begin - first + len(part)] = part
            of: dict[int, list[torch.Tensor]] = {}
            for param in bucket.params:
                start = self.offsets[param] - first
                of.setdefault(self.owners[param], []).append(memory[start : start + param.numel()])
            rows = {owner: torch.cat(parts) for owner, parts in of.items()}
            reduction = bucket.reduce(rows, Summing(self.counter, label="the exchange of master weights"), None)
            shard[bucket.offset : bucket.offset + bucket.width] = reduction.wait()
        return shard

    def _of(self, shard: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
        own = self.own_offsets[param]
        return shard[own : own + param.numel()]

    def _overlap(self, first: int, last: int, stock_numel: int) -> tuple[int, int]:
        """Return which of the elements from ``first`` to ``last`` DeepSpeed would give this rank; may be none."""
        begin = min(max(first, self.rank * stock_numel), last)
        return begin, max(begin, min(last, (self.rank + 1) * stock_numel))


_Spans = dict[int, tuple[int, int]]
"""Where rows begin and end in the memory of a bucket."""


class OwnedPlacement(Placement):
    """Of a bucket of ``params``, neighbours in the flat buffer: memory with the gradients in the order of their owners.

    Attributes:
        first, last: elements of the flat buffer.
        own: those of ``params`` that this rank owns.
    """

    def __init__(self, layout: OwnedLayout, params: Sequence[nn.Parameter]) -> None:
        super().__init__(*layout.own_part(params), sorted(params, key=layout.order_of))
        self._layout, self.params = layout, params
        self.own = [param for param in params if param in layout.own_offsets]
        self.first, self.last = layout.offsets[params[0]], layout.end_of(params[-1])
        self._rows: _Spans = {}  # by owner
        self._places: _Spans = {}  # by the place of the owner
        self._own_place: _Spans = {}  # by node, those of this rank's place
        nodes, end = layout.nodes, 0

        def lengthen(spans: _Spans, key: int, begin: int) -> None:
            spans[key] = spans.get(key, (begin, 0))[0], end

        for param in self.order:
            owner, begin, end = layout.owners[param], end, end + zero3.full_numel(param)
            lengthen(self._rows, owner, begin)
            if nodes is not None:
                node, place = divmod(owner, nodes.size)
                lengthen(self._places, place, begin)
                if place == nodes.local_rank:
                    lengthen(self._own_place, node, begin)

    def pack(
        self, gradients: Sequence[torch.Tensor | None], dtype: torch.dtype, above: torch.Tensor | None
    ) -> torch.Tensor:
        pieces = with_zeros(self.order, gradients, dtype)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def give(self, flat: torch.Tensor, shard: torch.Tensor, tag: int, label: str) -> InFlight:
        """Begin to give the parameters of this rank's ``shard`` to all ranks, in their flat buffer. Collective."""
        for param in self.own:
            self._layout.gradient_in(flat, param).copy_(self._layout._of(shard, param), non_blocking=True)
        return self._layout.give(flat, self.params, tag, label)

    def inputs(
        self, memory: torch.Tensor, most: int, nodes: Nodes | None, scaling: Scaling
    ) -> Iterator[ReduceScatterInput]:
        layout, numel = self._layout, most * self._layout.world_size
        spans = self._rows if nodes is None else self._places
        own = self._rows.get(layout.rank, (0, 0))[0]
        for first in range(0, len(memory), numel):
            chunk = scaling.of(memory[first : first + numel], layout.dtype)
            begin, end = (min(max(bound - own, 0), self.width) for bound in (first, first + len(chunk)))
            yield ReduceScatterInput(_rows_in(chunk, first, spans), ShardPart(self.offset + begin, end - begin, first))

    def reduce(self, rows: Mapping[int, torch.Tensor], how: Summing, out: torch.Tensor | None) -> InFlight:
        own = _row_of(self._layout.rank, rows)
        return reduce_to_owners(rows, own, self._layout.process_group, how, out)

    def reduce_within(self, nodes: Nodes, rows: Mapping[int, torch.Tensor], how: Summing) -> InFlight:
        own = _row_of(nodes.local_rank, rows)
        group, ranks = nodes.ranks_within(own.device)
        reduction = reduce_to_owners(rows, own, group, how, None, ranks)
        if self._layout.is_native:  # where it may lie in the memory of the whole bucket
            reduction.then(torch.clone)
        return reduction

    def reduce_between(
        self, nodes: Nodes, part: ShardPart, sums: torch.Tensor, how: Summing, out: torch.Tensor | None
    ) -> InFlight:
        first = max(part.begin, self._places.get(nodes.local_rank, (0, 0))[0])
        rows = _rows_in(sums, first, self._own_place)
        own = rows.get(nodes.node, sums[:0])
        sent = {node: row.to(self._layout.dtype) for node, row in rows.items()}
        group, ranks = nodes.ranks_between(sums.device)
        return reduce_to_owners(sent, own, group, how, out, ranks)


def _row_of(number: int, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return one of ``rows``; else a tensor without elements, which keeps none of their memory."""
    return rows[number] if number in rows else next(iter(rows.values())).new_empty(0)


def _rows_in(memory: torch.Tensor, first: int, spans: _Spans) -> dict[int, torch.Tensor]:
    """Return what ``memory`` has of each row; it has the bucket's from ``first`` on."""
    last = first + len(memory)
    cut = ((key, max(begin, first), min(end, last)) for key, (begin, end) in spans.items())
    return {key: memory[begin - first : end - first] for key, begin, end in cut if begin < end}
