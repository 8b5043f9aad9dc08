"""Where ZeRO keeps which part of each gradient: the layout that a reduction sends by, read off the live optimizer.

Over a process group of W ranks, each rank's partition has the same number of *columns*. Every parameter's gradient is
cut into pieces; a piece belongs to one rank and to a range of that rank's columns. Columns without a piece are padding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
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
    def end(self) -> int:
        """The column after the last."""
        return self.column + self.stop - self.start


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
    params: list[torch.nn.Parameter]
    columns: int
    pieces: list[list[Piece]]
    divisor: float
    dtype: torch.dtype
    group: int = 0
    _starts: list[list[int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._starts = [[piece.column for piece in pieces] for pieces in self.pieces]

    def within(self, rank: int, first: int, last: int) -> Iterator[Piece]:
        """What rank ``rank`` keeps in the columns from ``first`` up to ``last``."""
        pieces = self.pieces[rank]
        for piece in pieces[max(0, bisect_right(self._starts[rank], first) - 1) :]:
            if piece.column >= last:
                return
            column, end = max(piece.column, first), min(piece.end, last)
            if column < end:
                start = piece.start + column - piece.column
                yield Piece(piece.param, start, start + end - column, column)


def cut_flat(
    params: Sequence[torch.nn.Parameter], offsets: Sequence[int], columns: int, world_size: int
) -> list[list[Piece]]:
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
