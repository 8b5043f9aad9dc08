"""The files of ``torch.distributed.checkpoint`` (DCP): a file of data per rank, and one that says where what is.

Each rank knows what it has, so nothing is planned by one rank for all: every rank writes its boxes and leaves their
places in a file, from which the first rank makes ``.metadata``. DCP's own writer keeps a copy of all boxes until its
file is complete, and its own reader loads a stored box once for each part of it that is needed. Here, writing and
reading need the memory of one box of ``MOST_BYTES``, and each is read once.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from zerosync_strategy.core.checkpoints.manifests import METADATA, DamageError, FileState
from zerosync_strategy.core.checkpoints.pieces import Box, Content, Key, Piece, Sizes
from zerosync_strategy.core.failures.errors import in_words

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
    """A stream that adds up the checksum of what is written to ``file``. It does not close it."""

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
    """Write what this ``rank`` has to ``folder``, and where it is; return the state of the data file. Sends nothing."""
    entries: list[StoredEntry] = []
    path = folder / name_of(rank)
    with path.open("wb") as file:
        stream = _Summed(file)

        def save(value: Any) -> tuple[int, int]:
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
    """Return ``values`` on the host, as a storage of their own for ``torch.save``, without a copy if they are there."""
    if values.device.type != "cpu":
        return values.cpu()
    if not values.numel():
        return values.clone()
    return torch.from_numpy(values.reshape(-1).view(torch.uint8).numpy()).view(values.dtype).view(values.shape)


def complete(folder: Path, ranks: int, names: dict[Key, Key]) -> None:
    """Write ``.metadata`` from what ``ranks`` have left; raise ``DamageError`` if elements are missing or twice there.

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
    """Return the name under which DCP stores what has this key in nested dictionaries."""
    return ".".join(map(str, key))


# ---- reading ---------------------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """What a checkpoint has under a key: a tensor's dtype and shape; an object has no ``dtype``."""

    dtype: torch.dtype | None
    shape: Sizes


class Reader:
    """Reads the checkpoint in ``folder``, which DCP or :func:`complete` has written.

    Raises a ``DamageError`` if the folder has no readable ``.metadata``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._metadata = FileSystemReader(folder).read_metadata()
        except Exception as error:  # pickle may raise anything
            raise DamageError(f"its file {METADATA} cannot be read ({in_words(error)})") from error
        paths = self._metadata.planner_data or {}
        self.stored: dict[Key, Stored] = {}
        for name, found in self._metadata.state_dict_metadata.items():
            key = tuple(paths.get(name, (name,)))
            self.stored[key] = Stored(None, ())
            if isinstance(found, TensorStorageMetadata):
                self.stored[key] = Stored(found.properties.dtype, tuple(found.size))

    def object(self, key: Key) -> Any:
        """Return what is no tensor, or a whole tensor, on the host."""
        name = text_of(key)
        if self.stored[key].dtype is not None:
            values = torch.empty(self.stored[key].shape, dtype=self.stored[key].dtype)
            self.read({key: [Piece.whole(values)]})
            return values
        place = self._metadata.storage_data[MetadataIndex(name)]
        with (self._folder / place.relative_path).open("rb") as file:
            return self._load(file, place, name, weights_only=False)

    @torch.no_grad()
    def read(self, wanted: dict[Key, list[Piece]]) -> None:
        """Fill the values of the pieces, which may be of another dtype than what is stored."""
        needed = sorted(self._needed(wanted), key=lambda each: (each[0].relative_path, each[0].offset))
        for name, of_file in itertools.groupby(needed, key=lambda each: each[0].relative_path):
            with (self._folder / name).open("rb") as file:
                for place, tensor, parts in of_file:
                    stored = self._load(file, place, tensor, weights_only=True)
                    for target, source in parts:
                        target.copy_(stored[source])

    def _needed(self, wanted: dict[Key, list[Piece]]) -> Iterator[tuple[Any, str, list[tuple[torch.Tensor, Any]]]]:
        """Yield the stored boxes that are needed: place, name, and which parts of it go where."""
        for key, pieces in wanted.items():
            name = text_of(key)
            own = [box for piece in pieces for box in piece.boxes()]
            of_tensor: Any = self._metadata.state_dict_metadata[name]
            for chunk in of_tensor.chunks:
                parts = [part for box in own if (part := _overlap(box, chunk)) is not None]
                if parts:
                    yield self._metadata.storage_data[MetadataIndex(name, chunk.offsets)], name, parts

    def _load(self, file: BinaryIO, place: Any, name: str, weights_only: bool) -> Any:
        if place.transform_descriptors:
            raise DamageError(f"{name!r} is stored with the extensions {place.transform_descriptors}")
        file.seek(place.offset)
        data = file.read(place.length)
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
        except Exception as error:
            raise DamageError(f"{name!r} in {place.relative_path} is damaged ({in_words(error)})") from error


def _overlap(box: Box, chunk: ChunkStorageMetadata) -> tuple[torch.Tensor, tuple[slice, ...]] | None:
    """Return the part of ``box`` that ``chunk`` has, and where it is in the chunk; ``None`` if there is none."""
    target, source = [], []
    for begin, size, first, numel in zip(box.offsets, box.values.shape, chunk.offsets, chunk.sizes, strict=True):
        start, stop = max(begin, first), min(begin + size, first + numel)
        if start >= stop:
            return None
        target.append(slice(start - begin, stop - begin))
        source.append(slice(start - first, stop - first))
    return box.values[tuple(target)], tuple(source)
