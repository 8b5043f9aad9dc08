"""What a rank has of the tensors of a checkpoint: ranges of row-major elements, and the boxes that they are.

``torch.distributed.checkpoint`` stores boxes of tensors: offsets and sizes by dimension. What a ZeRO rank has of a
parameter is a contiguous range of its row-major elements. In n dimensions that is at most 2n - 1 boxes (in two: the end
of a row, full rows, the begin of a row), and each is a view of the flat buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

Key = tuple[str | int, ...]
"""Where a value is in the nested dictionaries of the checkpoint, as ``("model", "layer.weight")``."""
Sizes = tuple[int, ...]


class Box(NamedTuple):
    """Part of a tensor: where it begins in each dimension, and its ``values``, which have its sizes."""

    offsets: Sizes
    values: torch.Tensor


@dataclass(frozen=True)
class Piece:
    """Elements of a tensor of ``shape``, in row-major order from ``start``: ``values``, contiguous, of any shape."""

    shape: Sizes
    start: int
    values: torch.Tensor

    @staticmethod
    def whole(tensor: torch.Tensor) -> Piece:
        return Piece(tuple(tensor.shape), 0, tensor.detach().contiguous())

    def boxes(self, most_bytes: int | None = None) -> Iterator[Box]:
        """Yield the boxes of the piece, in order; each of at most ``most_bytes``, or of one element."""
        flat = self.values.reshape(-1)
        stop = self.start + flat.numel()
        limit = stop if most_bytes is None else max(1, most_bytes // flat.element_size())
        begin = self.start
        for first, last in _ranges(self.shape, self.start, stop, limit):
            for offsets, sizes in boxes(self.shape, first, last):
                numel = math.prod(sizes)
                yield Box(offsets, flat.narrow(0, begin - self.start, numel).view(sizes))
                begin += numel


@dataclass
class Content:
    """What a rank writes of a checkpoint, or reads.

    Attributes:
        tensors: the pieces that the rank has; all ranks together have each element once.
        objects: what is no tensor.
        names: further keys of tensors, each with the key under which some rank writes it.
    """

    tensors: dict[Key, list[Piece]] = field(default_factory=dict)
    objects: dict[Key, Any] = field(default_factory=dict)
    names: dict[Key, Key] = field(default_factory=dict)

    def add(self, key: Key, piece: Piece) -> None:
        self.tensors.setdefault(key, []).append(piece)


def boxes(shape: Sizes, start: int, stop: int) -> Iterator[tuple[Sizes, Sizes]]:
    """Yield offsets and sizes of the boxes that are the elements ``start`` to ``stop`` of ``shape``, in order."""
    if start >= stop:
        if math.prod(shape) == 0:  # a tensor without elements is one box
            yield (0,) * len(shape), shape
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    (first, begin), (last, end) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from _in_row(shape, first, begin, end)
        return
    if begin:
        yield from _in_row(shape, first, begin, row)
        first += 1
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if end:
        yield from _in_row(shape, last, 0, end)


def _in_row(shape: Sizes, row: int, begin: int, end: int) -> Iterator[tuple[Sizes, Sizes]]:
    for offsets, sizes in boxes(shape[1:], begin, end):
        yield (row, *offsets), (1, *sizes)


def _ranges(shape: Sizes, start: int, stop: int, limit: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of runs of at most ``limit`` elements, cut between rows of the first dimension if they fit."""
    if start >= stop:
        yield start, stop
    row = max(1, math.prod(shape[1:]))
    unit = limit // row * row or limit
    while start < stop:
        end = min(stop, (start // unit + 1) * unit)
        yield start, end
        start = end
