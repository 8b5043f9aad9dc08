"""Reads checkpoints by name, on any number of ranks: of ``torch.distributed.checkpoint`` (DCP) and of DeepSpeed.

DCP's own reader loads a stored box once for each part of it that is needed. Here, each is read once.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from zerosync_strategy.core.checkpoints.dcp import Box, Key, Piece, Sizes, text_of
from zerosync_strategy.core.checkpoints.manifests import METADATA, DamageError
from zerosync_strategy.core.engine.compilation import plain_name
from zerosync_strategy.core.engine.saved_files import Range, SavedFiles
from zerosync_strategy.core.failures.errors import AS_MANY, in_words


class Stored(NamedTuple):
    """What a checkpoint has under a key: a tensor's dtype and shape; an object has no ``dtype``."""

    dtype: torch.dtype | None
    shape: Sizes


_Needed = tuple[_StorageInfo, str, list[tuple[torch.Tensor, tuple[slice, ...]]]]
"""The place of a stored box, its tensor's name, and where which parts of it go."""


class DCPReader:
    """Reads the checkpoint in ``folder``, which DCP or :func:`dcp.complete` has written.

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

    def _needed(self, wanted: dict[Key, list[Piece]]) -> Iterator[_Needed]:
        """Yield the stored boxes that are needed: place, name, and which parts of it go where."""
        for key, pieces in wanted.items():
            name = text_of(key)
            own = [box for piece in pieces for box in piece.boxes()]
            of_tensor: Any = self._metadata.state_dict_metadata[name]
            for chunk in of_tensor.chunks:
                parts = [part for box in own if (part := _overlap(box, chunk)) is not None]
                if parts:
                    yield self._metadata.storage_data[MetadataIndex(name, chunk.offsets)], name, parts

    def _load(self, file: BinaryIO, place: _StorageInfo, name: str, weights_only: bool) -> Any:
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


class StockReader:
    """Reads the checkpoint in ``folder``, which DeepSpeed's ``save_checkpoint`` has written.

    Files are mapped into memory, so a rank reads what it needs of each. Raises a ``DamageError`` if they cannot be read
    by name.
    """

    def __init__(self, folder: Path) -> None:
        self.stored: dict[Key, Stored] = {}
        self._values: dict[Key, Any] = {}
        self._ranges: dict[Key, list[Range]] = {}
        try:
            files = SavedFiles(folder)
            self._add_model(files)
            self._add_optimizer(files)
        except (KeyError, ValueError, OSError, IndexError) as error:
            raise DamageError(f"{error}. {AS_MANY}") from error
        self._add(("engine",), files.engine_state() | {"client_state": files.client_state()})

    def _add_model(self, files: SavedFiles) -> None:
        for name, shape in files.shapes.items():
            self._add_ranges(("model", plain_name(name)), files.master(name), torch.float32, shape)
        for name, value in files.untrained().items():
            self._add(("model", plain_name(name)), value)
        for name, first in files.tied().items():
            if (found := ("model", plain_name(first))) in self.stored:
                self._add_ranges(("model", plain_name(name)), self._ranges[found], *self.stored[found])

    def _add_optimizer(self, files: SavedFiles) -> None:
        for name, shape in files.shapes.items():
            by_element, others = files.states(name)
            for kind, ranges in by_element.items():
                self._add_ranges(_state(name, kind), ranges, ranges[0].values.dtype, shape)
            for kind, value in others.items():
                self._add(_state(name, kind), value)
        for number, group in enumerate(files.groups()):
            names = [plain_name(name) for name in group["params"]]
            for option, value in (group | {"params": names}).items():
                self._add(("optimizer", "param_groups", number, option), value)

    def _add(self, key: Key, value: object) -> None:
        if torch.is_tensor(value):
            whole = Range(0, value.detach().reshape(-1))
            self._add_ranges(key, [whole], value.dtype, tuple(value.shape))
            return
        self.stored[key] = Stored(None, ())
        self._values[key] = value

    def _add_ranges(self, key: Key, ranges: list[Range], dtype: torch.dtype | None, shape: Sizes) -> None:
        self.stored[key] = Stored(dtype, shape)
        self._ranges[key] = ranges

    def object(self, key: Key) -> Any:
        """Return what is no tensor, or a whole tensor, on the host."""
        stored = self.stored[key]
        if stored.dtype is None:
            return self._values[key]
        values = torch.empty(stored.shape, dtype=stored.dtype)
        self.read({key: [Piece.whole(values)]})
        return values

    @torch.no_grad()
    def read(self, wanted: dict[Key, list[Piece]]) -> None:
        """Fill the values of the pieces, which may be of another dtype than what is stored."""
        for key, pieces in wanted.items():
            for start, values in self._ranges[key]:
                for piece in pieces:
                    flat = piece.values.view(-1)
                    begin, end = max(start, piece.start), min(start + len(values), piece.start + len(flat))
                    if begin < end:
                        flat[begin - piece.start : end - piece.start].copy_(values[begin - start : end - start])


def _state(name: str, kind: str) -> Key:
    return "optimizer", "state", plain_name(name), kind


Reader = DCPReader | StockReader
