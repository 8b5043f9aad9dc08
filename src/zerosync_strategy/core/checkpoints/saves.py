"""Saving: a checkpoint can be loaded only once all ranks have written their files (K1).

DeepSpeed's files are written where they are read, with manifests marked as incomplete until then. A distributed
checkpoint is written to a temporary directory, which at the end is renamed; until then, an older checkpoint of the same
tag stays as it was. What the tag refers to after the next load or save (``take_back``, ``_remove_older``), if a save is
killed with these directories present::

    TAG  .TAG.replaced  .TAG.writing
    old                 incomplete    the old one
         old            complete      the old one
    new  old                          the new one, with the program's files of the old one
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed as dist

from zerosync_strategy.core.checkpoints import dcp
from zerosync_strategy.core.checkpoints.background import background
from zerosync_strategy.core.checkpoints.dcp import Content
from zerosync_strategy.core.checkpoints.manifests import (
    LATEST,
    METADATA,
    REPLACED,
    WRITING,
    DamageError,
    FileState,
    Manifest,
    beside,
    check_whole,
    is_of_checkpoint,
    path_of,
    ranks_in,
    take_back,
)
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
    :attr:`in_background`: it is completed by a thread (``background.py``).
    """

    in_background = False

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
            take_back(self._folder)
            self._folder.mkdir(parents=True, exist_ok=True)
            if verifiable:
                manifest.write(self._folder)
            else:
                path_of(self._folder, manifest.rank).unlink(missing_ok=True)
            if manifest.rank == 0:  # what an earlier save under this tag has left
                (self._folder / METADATA).unlink(missing_ok=True)
                for path in self._folder.glob("*.distcp"):
                    path.unlink()
                for rank in ranks_in(self._folder):
                    if rank >= manifest.ranks:
                        path_of(self._folder, rank).unlink(missing_ok=True)
            return f"tag {self._tag!r}"

        _write_together(self.what, mark)
        self._manifest = manifest if verifiable else None

    @contextmanager
    def writing(self, path: str | None = None) -> Iterator[None]:
        """Around the writing of a file. Keeps an error until this rank has joined the others in DeepSpeed's barrier."""
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

    def publish(self) -> None:
        """Write the tag of the complete checkpoint to ``latest``, on the first rank."""
        if self._manifest is not None and self._manifest.rank == 0 and self._names_latest:
            temporary = self._directory / f"{LATEST}.tmp"
            temporary.write_text(self._tag, encoding="utf-8")
            os.replace(temporary, self._directory / LATEST)

    def abandon(self) -> None:
        """Remove what an unsuccessful save has left, if nothing else needs it."""

    def missing(self) -> list[int]:
        """Return the ranks that have not written all."""
        return []

    def written_by(self, rank: int) -> int:
        """Return the bytes that ``rank`` has written until now, as far as known."""
        return 0


class DistributedSave(EngineSave):
    """This rank's part of a distributed checkpoint. ``content``: what this rank writes."""

    content: Content

    def __init__(self, directory: Path, tag: str, step: int, names_latest: bool, in_background: bool) -> None:
        # The program may change its directory before a thread writes. A link stays, as under DeepSpeed.
        super().__init__(directory.resolve(), tag, step, checksums=True, names_latest=names_latest)
        self.in_background, self._folder = in_background, self._folder.resolve()
        self._working, self._older = beside(self._folder, WRITING), beside(self._folder, REPLACED)

    def begin(self, save: str, verifiable: bool) -> None:
        manifest = Manifest(save, dist.get_rank(), dist.get_world_size(), self._step, time.time(), is_complete=True)

        def make() -> str:
            taken = {self._directory, *self._directory.parents, self._directory / LATEST}
            if self._folder in taken or (self._folder.exists() and not self._folder.is_dir()):
                raise ValueError(f"the tag {self._tag!r} names {self._folder}, which is something else. Give another")
            take_back(self._folder)
            if manifest.rank == 0:
                _remove(self._working)  # of a save that was killed
                self._working.mkdir(parents=True)
            return f"tag {self._tag!r}"

        _write_together(self.what, make)
        self._manifest = manifest

    def complete(self) -> None:
        """Write this rank's data and its manifest."""
        assert self._manifest is not None
        state = dcp.write(self._working, self._manifest.rank, self.content)
        self._manifest = replace(self._manifest, files={dcp.name_of(self._manifest.rank): state})
        self._manifest.write(self._working)

    def publish(self) -> None:
        """Complete the checkpoint and give it its name, on the first rank."""
        assert self._manifest is not None
        if self._manifest.rank != 0:
            return
        dcp.complete(self._working, self._manifest.ranks, self.content.names)
        metadata = {METADATA: FileState.of(self._working / METADATA, checksums=True)}
        replace(self._manifest, files=self._manifest.files | metadata).write(self._working)
        if (found := check_whole(self._working, contents=False)) is None or found.save != self._manifest.save:
            raise DamageError(f"another run writes to the same directory ({self._working})")
        self._remove_older()  # of a save that was killed
        if self._folder.exists():
            os.rename(self._folder, self._older)
        os.rename(self._working, self._folder)
        self._remove_older()
        super().publish()

    def _remove_older(self) -> None:
        """Remove the replaced checkpoint, after moving the program's own files in it to the new one."""
        for entry in self._older.iterdir() if self._older.exists() and self._folder.exists() else ():
            if not is_of_checkpoint(entry.name) and not (self._folder / entry.name).exists():
                os.rename(entry, self._folder / entry.name)
        _remove(self._older)

    def missing(self) -> list[int]:
        assert self._manifest is not None
        return [rank for rank in range(self._manifest.ranks) if not path_of(self._working, rank).exists()]

    def written_by(self, rank: int) -> int:
        path = self._working / dcp.name_of(rank)
        return path.stat().st_size if path.exists() else 0

    def abandon(self) -> None:
        if self._manifest is not None and self._manifest.rank == 0:
            with suppress(OSError):
                take_back(self._folder)
            shutil.rmtree(self._working, ignore_errors=True)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


@dataclass
class _Save:
    """One save, with a part for each engine."""

    id: str = ""
    engines: list[EngineSave] = field(default_factory=list)
    failed: Exception | None = None  # of the program, after an engine has written

    @property
    def what(self) -> str:
        return self.engines[0].what

    def complete(self) -> None:
        if self.failed is not None:
            raise self.failed
        for engine in self.engines:
            engine.complete()

    def publish(self) -> None:
        for engine in self.engines:
            engine.publish()

    def abandon(self) -> None:
        for engine in self.engines:
            engine.abandon()

    def missing(self) -> list[int]:
        return sorted({rank for engine in self.engines for rank in engine.missing()})

    def written_by(self, rank: int) -> int:
        return sum(engine.written_by(rank) for engine in self.engines)


_current: _Save | None = None


@contextmanager
def one_save() -> Iterator[None]:
    """Around the calls that save one checkpoint, of one or several engines. Collective.

    The checkpoint is complete at the end, or when the save in the background has ended. Until then, and if anything is
    raised, loading it is refused. If a rank could not write, every rank raises a ``CheckpointError``.
    """
    global _current
    if _current is not None:
        yield
        return
    _current = save = _Save()
    try:
        yield
    except (CheckpointError, RankError):  # raised on the other ranks, too
        save.abandon()
        raise
    except Exception as error:
        if not save.engines:
            raise
        save.failed = error
    finally:
        _current = None
    if any(engine.in_background for engine in save.engines):
        background().start(save)
        if save.failed is not None:
            background().wait()
    elif save.engines:
        try:
            with rank_status().activity(f"the attempt to {save.what}"):
                _write_together(save.what, save.complete)
                _write_together(save.what, save.publish)
        except CheckpointError:
            save.abandon()
            raise


@contextmanager
def engine_save(engine: EngineSave, verifiable: bool) -> Iterator[None]:
    """Around the save of one engine. Collective.

    Every rank raises a ``CheckpointError`` if one could not write. Another error raises it on this rank alone.
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
