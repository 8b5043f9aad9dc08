"""The files of ``torch.distributed.checkpoint`` (DCP): a data file per rank, and ``.metadata``, which indexes them.

DCP stores boxes of tensors: offsets and sizes by dimension. What a ZeRO rank has of a parameter is a contiguous range
of its row-major elements. In n dimensions that is at most 2n - 1 boxes (in two: the end of a row, full rows, the begin
of a row), and each is a view of the flat buffer.

No rank plans for the others: every rank writes its boxes, and their offsets to a file of its own, from which the first
rank makes ``.metadata``. DCP's own writer keeps a copy of all boxes until its file is complete. Here, writing and
reading (``readers.py``) need the memory of one box of :data:`MOST_BYTES`.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from zerosync_strategy.core.checkpoints.manifests import DamageError, FileState

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


# ---- writing ---------------------------------------------------------------------------------------------------------


MOST_BYTES = 16 << 20
"""Of one stored box. A reader needs the memory of one, and reads it whole if it needs a part."""


class StoredEntry(NamedTuple):
    """One stored box, or one object, which has no ``dtype``; at ``offset`` in its rank's file, ``length`` bytes."""

    key: Key
    dtype: torch.dtype | None
    shape: Sizes
    offsets: Sizes
    sizes: Sizes
    offset: int
    length: int


class _Summed(io.RawIOBase):
    """A stream that writes to ``file`` and computes the checksum. Closing it leaves ``file`` open."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.crc32, self.size = file, 0, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._file.write(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        size = memoryview(data).nbytes
        self.size += size
        return size


def name_of(rank: int) -> str:
    """Return the name of the data file of ``rank``."""
    return f"__{rank}_0.distcp"


def _entries_of(rank: int) -> str:
    return f"__{rank}.entries"


def write(folder: Path, rank: int, content: Content) -> FileState:
    """Write the ``content`` of this ``rank``, and its offsets, to ``folder``; return the data file's state."""
    entries: list[StoredEntry] = []
    path = folder / name_of(rank)
    with path.open("wb") as file:
        stream = _Summed(file)

        def save(value: object) -> tuple[int, int]:
            begin = stream.size
            torch.save(value, cast("IO[bytes]", stream))
            return begin, stream.size - begin

        for key, value in content.objects.items():
            entries.append(StoredEntry(key, None, (), (), (), *save(value)))
        for key, pieces in content.tensors.items():
            for piece in pieces:
                for box in piece.boxes(MOST_BYTES):
                    place = save(_alone(box.values))
                    sizes = tuple(box.values.shape)
                    entries.append(StoredEntry(key, piece.values.dtype, piece.shape, box.offsets, sizes, *place))
        file.flush()
        os.fsync(file.fileno())
    with (folder / _entries_of(rank)).open("wb") as file:
        pickle.dump(entries, file)
    return FileState(stream.size, stream.crc32, of_records=False)


def _alone(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` on the host with a storage of their own, as ``torch.save`` needs; a copy only from a device."""
    if values.device.type != "cpu":
        return values.cpu()
    if not values.numel():
        return values.clone()
    return torch.from_numpy(values.reshape(-1).view(torch.uint8).numpy()).view(values.dtype).view(values.shape)


def complete(folder: Path, ranks: int, names: dict[Key, Key]) -> None:
    """Write ``.metadata`` from the offsets of all ``ranks``; raise ``DamageError`` if elements are missing or double.

    ``names``: see :class:`Content`.
    """
    metadata, results = Metadata({}, planner_data={}), []
    for rank in range(ranks):
        path = folder / _entries_of(rank)
        try:
            entries: list[StoredEntry] = pickle.loads(path.read_bytes())
        except FileNotFoundError:
            raise DamageError(
                f"{path.name} is missing. Either another run writes to the same directory, or rank {rank} to another"
                " file system"
            ) from None
        for entry in entries:
            results.append(_record(entry, name_of(rank), metadata))
        path.unlink()
    by_key = defaultdict(list)
    for result in results:
        by_key[result.index.fqn].append(result)
    for key, first in names.items():
        metadata.state_dict_metadata[text_of(key)] = metadata.state_dict_metadata[text_of(first)]
        metadata.planner_data[text_of(key)] = key
        for result in by_key[text_of(first)]:
            index = MetadataIndex(text_of(key), result.index.offset, result.index.index)
            results.append(WriteResult(index, result.size_in_bytes, result.storage_data))
    _check_elements(metadata)
    FileSystemWriter(folder).finish(metadata, [results])


def _record(entry: StoredEntry, file: str, metadata: Metadata) -> WriteResult:
    found, name = metadata.state_dict_metadata, text_of(entry.key)
    metadata.planner_data[name] = entry.key
    place = _StorageInfo(file, entry.offset, entry.length)
    if entry.dtype is None:
        found[name] = BytesStorageMetadata()
        return WriteResult(MetadataIndex(name), entry.length, place)
    of_tensor: Any = found.get(name)
    if of_tensor is None:
        properties = TensorProperties(dtype=entry.dtype)
        of_tensor = found[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), [])
    index = MetadataIndex(name, torch.Size(entry.offsets), len(of_tensor.chunks))
    of_tensor.chunks.append(ChunkStorageMetadata(torch.Size(entry.offsets), torch.Size(entry.sizes)))
    return WriteResult(index, entry.length, place)


def _check_elements(metadata: Metadata) -> None:
    for name, found in metadata.state_dict_metadata.items():
        if isinstance(found, TensorStorageMetadata):
            numel = sum(chunk.sizes.numel() for chunk in found.chunks)
            if numel != found.size.numel():
                raise DamageError(f"the ranks have written {numel:,} elements of {name!r}, of {found.size.numel():,}")


def text_of(key: Key) -> str:
    """Return DCP's name for a key of nested dictionaries."""
    return ".".join(map(str, key))
