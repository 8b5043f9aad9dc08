"""Saving: a checkpoint is marked as incomplete from before its first file until all ranks have written theirs (K1)."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed as dist

from zerosync_strategy.core.checkpoints.manifests import LATEST, FileState, Manifest, path_of, ranks_in
from zerosync_strategy.core.comm.collectives import broadcast_object
from zerosync_strategy.core.failures.agreement import together
from zerosync_strategy.core.failures.errors import (
    UNWRITABLE,
    CheckpointError,
    RankError,
    in_words,
    is_communication_error,
)
from zerosync_strategy.core.failures.rank_status import rank_status


class EngineSave:
    """This rank's part of one engine's save.

    ``checksums``: compute checksums for files that contain none. ``names_latest``: write the tag to ``latest``.
    """

    def __init__(self, directory: Path, tag: str, step: int, checksums: bool, names_latest: bool) -> None:
        self.what = f"write the checkpoint in {directory}"
        self._directory, self._tag, self._folder = directory, tag, directory / tag
        self._step, self._checksums, self._names_latest = step, checksums, names_latest
        self._manifest: Manifest | None = None
        self._written: list[Path] = []
        self._failed: Exception | None = None

    def begin(self, save: str, verifiable: bool) -> None:
        """Mark this rank's files under this tag as incomplete, of the save with the id ``save``. Collective.

        ``verifiable``: files are on the disk once written. Otherwise the save has no manifest.
        """
        manifest = Manifest(save, dist.get_rank(), dist.get_world_size(), self._step, time.time())

        def mark() -> str:
            self._folder.mkdir(parents=True, exist_ok=True)
            if verifiable:
                manifest.write(self._folder)
            else:
                path_of(self._folder, manifest.rank).unlink(missing_ok=True)
            if manifest.rank == 0:  # manifests of an earlier save by more ranks
                for rank in ranks_in(self._folder):
                    if rank >= manifest.ranks:
                        path_of(self._folder, rank).unlink(missing_ok=True)
            return f"tag {self._tag!r}"

        _write_together(self.what, mark)
        self._manifest = manifest if verifiable else None

    @contextmanager
    def writing(self, path: str | None = None) -> Iterator[None]:
        """Wrap the writing of a file. An error is kept for later, as the other ranks go to DeepSpeed's barrier."""
        try:
            yield
        except Exception as error:
            self._failed = self._failed or error
        else:
            if path is not None:
                self._written.append(Path(path))

    def raise_failure(self) -> None:
        if self._failed is not None:
            raise self._failed

    def complete(self) -> None:
        """Complete the manifest of this rank, with the states of its files."""
        if self._manifest is not None:
            files = {
                path.relative_to(self._folder).as_posix(): FileState.of(path, self._checksums) for path in self._written
            }
            replace(self._manifest, is_complete=True, files=files).write(self._folder)

    def name_latest(self) -> None:
        """Write the tag of the complete checkpoint to ``latest``, on the first rank."""
        if self._manifest is not None and self._manifest.rank == 0 and self._names_latest:
            temporary = self._directory / f"{LATEST}.tmp"
            temporary.write_text(self._tag, encoding="utf-8")
            os.replace(temporary, self._directory / LATEST)


@dataclass
class _Save:
    id: str = ""
    engines: list[EngineSave] = field(default_factory=list)


_current: _Save | None = None


@contextmanager
def one_save() -> Iterator[None]:
    """Wrap the calls that save one checkpoint on all ranks, with all its parts. Collective.

    The checkpoint is complete at the end. Until then, and if anything is raised, loading it is refused. If a rank could
    not write, every rank raises a ``CheckpointError``.
    """
    global _current
    if _current is not None:
        yield
        return
    _current = _Save()
    failed: Exception | None = None
    try:
        yield
    except (CheckpointError, RankError):  # raised on the other ranks, too
        raise
    except Exception as error:
        if not _current.engines:
            raise
        failed = error
    finally:
        engines, _current = _current.engines, None

    def complete() -> None:
        if failed is not None:
            raise failed
        for engine in engines:
            engine.complete()

    def name_latest() -> None:
        for engine in engines:
            engine.name_latest()

    if engines:
        what = engines[0].what
        with rank_status().activity(f"the attempt to {what}"):
            _write_together(what, complete)
            _write_together(what, name_latest)


@contextmanager
def engine_save(engine: EngineSave, verifiable: bool) -> Iterator[None]:
    """Wrap the save of one engine. Collective.

    Every rank raises a ``CheckpointError`` if one could not write. Any other error raises it on this rank alone.
    """
    with one_save():
        assert _current is not None
        if not _current.engines:
            _current.id = broadcast_object(secrets.token_hex(8), 0, None)
        _current.engines.append(engine)
        engine.begin(_current.id, verifiable)
        try:
            yield
        except Exception as error:  # its text names neither the path nor the cause
            if isinstance(error, CheckpointError) or is_communication_error(error):
                raise
            raise CheckpointError(f"Cannot {engine.what}: {in_words(error).rstrip(':. ')}. {UNWRITABLE}") from error
        _write_together(engine.what, engine.raise_failure)


def _write_together(what: str, write: Callable[[], str | None]) -> None:
    together(what, lambda: (write() or "", None), lambda: UNWRITABLE)
