"""Reads DeepSpeed's own checkpoints as :class:`dcp.Reader` reads distributed ones: on any ranks and ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zerosync_strategy.core.checkpoints.dcp import Stored
from zerosync_strategy.core.checkpoints.manifests import DamageError
from zerosync_strategy.core.checkpoints.pieces import Key, Piece
from zerosync_strategy.core.engine.saved_files import Range, SavedFiles
from zerosync_strategy.core.failures.errors import AS_MANY


class StockReader:
    """Reads the checkpoint in ``folder``, which DeepSpeed's ``save_checkpoint`` has written.

    Files are mapped into memory, so a rank reads what it needs of each. Raises a ``DamageError`` if they cannot be read
    by name.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._files = SavedFiles(folder)
        except (KeyError, ValueError, OSError, IndexError) as error:
            raise DamageError(f"{error}. {AS_MANY}") from error
        self.stored: dict[Key, Stored] = {}
        self._values: dict[Key, Any] = {}
        self._ranges: dict[Key, Callable[[], Iterable[Range]]] = {}
        self._add_model()
        for name in self._files.shapes:
            for kind, value in self._files.states(name).items():
                self._add(("optimizer", "state", _plain(name), kind), value, self._files.shapes[name])
        for number, group in enumerate(self._files.groups()):
            names = [_plain(name) for name in group["params"]]
            for option, value in (group | {"params": names}).items():
                self._add(("optimizer", "param_groups", number, option), value)

    def _add_model(self) -> None:
        for name, shape in self._files.shapes.items():
            key = ("model", _plain(name))
            self.stored[key] = Stored(torch.float32, shape)
            self._ranges[key] = partial(self._files.master, name)
        for name, value in self._files.untrained().items():
            self._add(("model", _plain(name)), value)
        for name, first in self._files.tied().items():
            found = ("model", _plain(first))
            if found in self.stored:
                self.stored["model", _plain(name)] = self.stored[found]
                self._ranges["model", _plain(name)] = self._ranges[found]
        engine = self._files.engine_state() | {"client_state": self._files.client_state()}
        self._add(("engine",), engine)

    def _add(self, key: Key, value: Any, shape: tuple[int, ...] = ()) -> None:
        """Add a value; ``shape``: of the parameter, if it is a list of ranges of its elements."""
        if isinstance(value, list) and value and isinstance(value[0], Range):
            self.stored[key] = Stored(value[0].values.dtype, shape)
            self._ranges[key] = partial(iter, value)
        elif torch.is_tensor(value):
            self.stored[key] = Stored(value.dtype, tuple(value.shape))
            self._ranges[key] = partial(_whole, value)
        else:
            self.stored[key] = Stored(None, ())
            self._values[key] = value

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
            for start, values in self._ranges[key]():
                for piece in pieces:
                    flat = piece.values.view(-1)
                    begin, end = max(start, piece.start), min(start + len(values), piece.start + len(flat))
                    if begin < end:
                        flat[begin - piece.start : end - piece.start].copy_(values[begin - start : end - start])


def _whole(value: torch.Tensor) -> Iterable[Range]:
    return [Range(0, value.detach().reshape(-1))]


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")
