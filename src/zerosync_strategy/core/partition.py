"""Where ZeRO keeps which part of each gradient: the layout that a reduction sends by, read off the live optimizer.

Over a process group of W ranks, each rank's partition has the same number of *columns*. Every parameter's gradient is
cut into pieces; a piece belongs to one rank and to a range of that rank's columns. Columns without a piece are padding.
A *shipment* is what one collective carries: for each rank, some of the pieces that it keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of a flattened gradient, kept from ``column`` onwards by their rank."""

    param: torch.nn.Parameter
    start: int
    stop: int
    column: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def between(self, first: int, last: int) -> Piece:
        """The part of it in the columns from ``first`` up to ``last``; may be empty."""
        first, last = max(first, self.column), min(last, self.column + self.size)
        start = self.start + first - self.column
        return Piece(self.param, start, start + max(0, last - first), first)


@dataclass
class Partition:
    """The gradients that one process group partitions.

    Attributes:
        process_group: the group; rank r of it keeps ``pieces[r]``.
        params: the parameters, each once.
        columns: columns per rank.
        pieces: by rank, in the order of their columns.
        divisor: what a sum over the group is divided by to average it.
        dtype: of the reduction.
        group: DeepSpeed's index of the parameter group.
    """

    process_group: Any
    params: list[Any]
    columns: int
    pieces: list[list[Piece]]
    divisor: float
    dtype: torch.dtype
    group: int = 0
    _by_param: dict[Any, list[tuple[int, Piece]]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        for rank, pieces in enumerate(self.pieces):
            for piece in pieces:
                self._by_param.setdefault(piece.param, []).append((rank, piece))

    def shipment_of(self, params: Iterable[Any]) -> Shipment:
        """All pieces of ``params``: as uneven over the ranks as they happen to lie."""
        rows: list[list[Piece]] = [[] for _ in self.pieces]
        for param in params:
            for rank, piece in self._by_param.get(param, ()):
                rows[rank].append(piece)
        return Shipment(self, rows)

    def shipments_of(self, params: set[Any], width: int) -> Iterator[Shipment]:
        """All pieces of ``params`` by ranges of ``width`` columns: all ranks are sent about as much at a time."""
        waiting = [[piece for piece in pieces if piece.param in params] for pieces in self.pieces]
        first = [0] * len(waiting)
        for column in range(0, self.columns, width):
            rows: list[list[Piece]] = []
            for rank, pieces in enumerate(waiting):
                row = []
                while first[rank] < len(pieces) and pieces[first[rank]].column < column + width:
                    piece = pieces[first[rank]]
                    if (part := piece.between(column, column + width)).size:
                        row.append(part)
                    if piece.column + piece.size > column + width:
                        break
                    first[rank] += 1
                rows.append(row)
            if any(rows):
                yield Shipment(self, rows)


@dataclass
class Shipment:
    """What one collective carries: row r goes to rank r of the partition's group."""

    partition: Partition
    rows: list[list[Piece]]

    def __post_init__(self) -> None:
        self.widths = [sum(piece.size for piece in row) for row in self.rows]


def cut_flat(params: Sequence[Any], offsets: Sequence[int], columns: int, world_size: int) -> list[list[Piece]]:
    """Pieces of a flat buffer that holds ``params`` at ``offsets`` and is cut into ``world_size`` equal parts."""
    pieces: list[list[Piece]] = [[] for _ in range(world_size)]
    for param, offset in sorted(zip(params, offsets, strict=True), key=lambda pair: pair[1]):
        for rank in range(world_size):
            first = max(offset, rank * columns)
            last = min(offset + param.numel(), (rank + 1) * columns)
            if first < last:
                pieces[rank].append(Piece(param, first - offset, last - offset, first - rank * columns))
    return pieces


def cut_each(params: Sequence[Any], sizes: Sequence[int], shares: Sequence[int], world_size: int) -> list[list[Piece]]:
    """Pieces where every parameter is cut by itself: ``sizes`` elements into ``world_size`` times ``shares``."""
    pieces: list[list[Piece]] = [[] for _ in range(world_size)]
    column = 0
    for param, size, share in zip(params, sizes, shares, strict=True):
        for rank in range(world_size):
            first, last = min(rank * share, size), min((rank + 1) * share, size)
            if first < last:
                pieces[rank].append(Piece(param, first, last, column))
        column += share
    return pieces
