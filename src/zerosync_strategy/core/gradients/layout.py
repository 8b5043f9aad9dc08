"""Where ZeRO keeps which part of each gradient: the layout that a reduction sends by, read off the live optimizer.

Over a process group of W ranks, each rank's shard has the same number of elements. Every gradient is cut into slices; a
slice belongs to one rank, at an offset in that rank's shard. Elements of a shard without a slice are padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class ShardSlice:
    """Elements ``start`` to ``stop`` of a flattened gradient, at ``offset`` in the shard of their rank."""

    param: torch.nn.Parameter
    start: int
    stop: int
    offset: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def between(self, first: int, last: int) -> ShardSlice:
        """Return the part of it at the offsets from ``first`` up to ``last``; may be empty."""
        first, last = max(first, self.offset), min(last, self.offset + self.size)
        start = self.start + first - self.offset
        return ShardSlice(self.param, start, start + max(0, last - first), first)


@dataclass
class ReduceScatterInput:
    """What one reduce-scatter packs: row r goes to rank r of the layout's process group.

    Attributes:
        layout: of the gradients.
        rows: by rank, the slices that it receives.
        name: for profiles.
        widths: by rank, the elements that it receives.
    """

    layout: ShardLayout
    rows: list[list[ShardSlice]]
    name: str
    widths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.widths = [sum(piece.size for piece in row) for row in self.rows]


@dataclass
class ShardLayout:
    """The gradients that one process group shards.

    Attributes:
        process_group: the group; rank r of it keeps ``slices[r]``.
        params: the parameters, each once.
        shard_numel: elements of one rank's shard.
        slices: by rank, in the order of their offsets.
        divisor: what a sum over the group is divided by to average it.
        dtype: of the reduction.
        group_index: DeepSpeed's index of the parameter group, on stages 1 and 2.
    """

    process_group: Any
    params: list[Any]
    shard_numel: int
    slices: list[list[ShardSlice]]
    divisor: float
    dtype: torch.dtype
    group_index: int = 0
    _by_param: dict[Any, list[tuple[int, ShardSlice]]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        for rank, slices in enumerate(self.slices):
            for piece in slices:
                self._by_param.setdefault(piece.param, []).append((rank, piece))

    @property
    def world_size(self) -> int:
        return len(self.slices)

    def input_of(self, params: Iterable[Any], name: str) -> ReduceScatterInput:
        """Return all slices of ``params``, as unevenly spread over the ranks as they happen to lie."""
        rows: list[list[ShardSlice]] = [[] for _ in self.slices]
        for param in params:
            for rank, piece in self._by_param.get(param, ()):
                rows[rank].append(piece)
        return ReduceScatterInput(self, rows, name)

    def inputs_by_offset(self, params: set[Any], width: int) -> Iterator[ReduceScatterInput]:
        """Yield all slices of ``params`` by ranges of ``width`` offsets: every rank receives as much at a time."""
        waiting = [[piece for piece in slices if piece.param in params] for slices in self.slices]
        first = [0] * len(waiting)
        for offset in range(0, self.shard_numel, width):
            rows: list[list[ShardSlice]] = []
            for rank, slices in enumerate(waiting):
                row = []
                while first[rank] < len(slices) and slices[first[rank]].offset < offset + width:
                    piece = slices[first[rank]]
                    if (part := piece.between(offset, offset + width)).size:
                        row.append(part)
                    if piece.offset + piece.size > offset + width:
                        break
                    first[rank] += 1
                rows.append(row)
            if any(rows):
                last = min(offset + width, self.shard_numel)
                yield ReduceScatterInput(self, rows, f"elements {offset} to {last} of each shard")


def cut_flat(
    params: Sequence[Any], offsets: Sequence[int], shard_numel: int, world_size: int
) -> list[list[ShardSlice]]:
    """Return the slices of a flat buffer that holds ``params`` at ``offsets`` and is cut into equal shards."""
    slices: list[list[ShardSlice]] = [[] for _ in range(world_size)]
    for param, offset in sorted(zip(params, offsets, strict=True), key=lambda pair: pair[1]):
        for rank in range(world_size):
            first = max(offset, rank * shard_numel)
            last = min(offset + param.numel(), (rank + 1) * shard_numel)
            if first < last:
                slices[rank].append(ShardSlice(param, first - offset, last - offset, first - rank * shard_numel))
    return slices


def cut_each(
    params: Sequence[Any], numels: Sequence[int], shard_numels: Sequence[int], world_size: int
) -> list[list[ShardSlice]]:
    """Return the slices where every parameter is cut by itself, into ``world_size`` shards of its ``shard_numels``."""
    slices: list[list[ShardSlice]] = [[] for _ in range(world_size)]
    offset = 0
    for param, numel, shard_numel in zip(params, numels, shard_numels, strict=True):
        for rank in range(world_size):
            first, last = min(rank * shard_numel, numel), min((rank + 1) * shard_numel, numel)
            if first < last:
                slices[rank].append(ShardSlice(param, first, last, offset))
        offset += shard_numel
    return slices
