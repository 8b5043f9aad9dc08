"""Reads DeepSpeed's own checkpoints as :class:`dcp.Reader` reads distributed ones: on any ranks and ZeRO stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from zerosync_strategy.core.checkpoints.dcp import Stored
from zerosync_strategy.core.checkpoints.manifests import DamageError
from zerosync_strategy.core.checkpoints.pieces import Key, Piece, Sizes
from zerosync_strategy.core.engine.compilation import plain_name
from zerosync_strategy.core.engine.saved_files import Range, SavedFiles
from zerosync_strategy.core.failures.errors import AS_MANY


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

    def _add(self, key: Key, value: Any) -> None:
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
