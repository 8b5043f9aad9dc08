"""A manifest per rank in the directory of a tag: the id of the save, and the files that the rank has written.

While a checkpoint is written, its manifests are marked as incomplete; they are completed when all files are on disk. So
interrupted saves, files of two saves and later changes are found, by a run that loads or by ``zerosync doctor`` (K1).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from zerosync_strategy.core.failures.errors import CheckpointError, in_words

_NAME = re.compile(r"zerosync_rank_(\d+)\.json")
_CHUNK = 1 << 22
_MAGIC = b"PK\x03\x04"
LATEST = "latest"
"""Name of the file that names the tag to load."""
METADATA = ".metadata"
"""The file that a checkpoint in the format of ``torch.distributed.checkpoint`` has, once it is complete."""
WRITING = ".writing"
"""Suffix of the directory of a distributed checkpoint until it is complete."""
REPLACED = ".replaced"
"""Suffix of the directory of the checkpoint that had the tag before, while the new one gets it."""
SHARDS = "*optim_states.pt"
"""Files of a checkpoint with the optimizer's shards."""
MODULES = "*mp_rank_*_model_states.pt"
"""Files of a checkpoint with the module."""


class DamageError(CheckpointError):
    """Files of a checkpoint have changed since the save, or are of different saves; the text names them."""


# ---- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileState:
    """The size and checksum of a file when it had been written.

    Attributes:
        crc32: of the whole file; with ``of_records``, of the checksums of its records, which ``torch.save`` writes into
            the file; ``None``: not computed.
        of_records: the file is an archive of ``torch.save`` with checksums.
    """

    size: int
    crc32: int | None
    of_records: bool

    @staticmethod
    def of(path: Path, checksums: bool) -> FileState:
        """Return the state of ``path``. Its content is read only with ``checksums``, and if it has none itself."""
        size = path.stat().st_size
        if _is_archive(path):
            with zipfile.ZipFile(path) as archive:
                if all(info.CRC or not info.file_size for info in archive.infolist()):  # see _check_archive
                    return FileState(size, _crc_of_records(archive), of_records=True)
        return FileState(size, _crc_of(path) if checksums else None, of_records=False)

    def check(self, path: Path, contents: bool) -> None:
        """Raise a ``DamageError`` if ``path`` differs from this state. Its content is read only with ``contents``."""
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DamageError(f"{path.name} cannot be read ({type(error).__name__})") from None
        if size != self.size:
            raise DamageError(f"{path.name} has {size:,} bytes and had {self.size:,} when it was saved")
        if self.of_records:
            _check_archive(path, contents, self.crc32)
        elif contents and self.crc32 is not None and _crc_of(path) != self.crc32:
            raise DamageError(f"{path.name} has another checksum than when it was saved")


def check_unlisted(path: Path, contents: bool) -> None:
    """Raise a ``DamageError`` if ``path``, which no manifest lists, differs from its own checksums."""
    if _is_archive(path):
        _check_archive(path, contents, None)


def _is_archive(path: Path) -> bool:
    """Return whether ``path`` begins as an archive of ``torch.save``; a ``DamageError`` if it is empty."""
    with path.open("rb") as file:
        magic = file.read(len(_MAGIC))
    if not magic:
        raise DamageError(f"{path.name} is empty")
    return magic == _MAGIC


def _check_archive(path: Path, contents: bool, saved: int | None) -> None:
    """Compare an archive with its own checksums, and these with ``saved``, if given."""
    try:
        with zipfile.ZipFile(path) as archive:
            if saved is not None and _crc_of_records(archive) != saved:
                raise DamageError(f"{path.name} is another file than was saved under this name")
            for info in archive.infolist() if contents else ():
                if not info.CRC:  # torch.serialization.set_crc32_options(False)
                    continue
                with archive.open(info) as record:
                    while record.read(_CHUNK):
                        pass
    except DamageError:
        raise
    except Exception as error:  # zipfile may raise anything for damaged bytes
        raise _damaged(path, error) from None


def _crc_of_records(archive: zipfile.ZipFile) -> int:
    return zlib.crc32(repr([(info.filename, info.CRC, info.file_size) for info in archive.infolist()]).encode())


def _crc_of(path: Path) -> int:
    crc, buffer = 0, memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            crc = zlib.crc32(buffer[:size], crc)
    return crc


def _damaged(path: Path, error: Exception) -> DamageError:
    return DamageError(f"{path.name} is damaged ({in_words(error)})")


# ---- manifests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    """What one rank has written of a checkpoint.

    Attributes:
        save: the unique id of the save, the same on all ranks.
        step: optimizer steps done.
        time: of the save, in seconds since 1970.
        is_complete: all files of this rank have been written.
        files: by name, relative to the directory of the tag.
    """

    save: str
    rank: int
    ranks: int
    step: int
    time: float
    is_complete: bool = False
    files: dict[str, FileState] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Write the manifest to the ``directory`` of a tag. It replaces an earlier one atomically."""
        path = path_of(directory, self.rank)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(dataclasses.asdict(self), indent=1), encoding="utf-8")
        os.replace(temporary, path)


def path_of(directory: Path, rank: int) -> Path:
    """Return the path of the manifest of ``rank``, in the ``directory`` of a tag."""
    return directory / f"zerosync_rank_{rank}.json"


def is_distributed(directory: Path) -> bool:
    """Return whether the ``directory`` of a tag has a checkpoint of ``torch.distributed.checkpoint``.

    A killed save may have renamed it: :func:`take_back` is called first.
    """
    take_back(directory)
    return (directory / METADATA).is_file()


def beside(directory: Path, suffix: str) -> Path:
    """Return the directory with this ``suffix`` beside the ``directory`` of a tag, which may be a link."""
    directory = directory.resolve()
    return directory.with_name(f".{directory.name}{suffix}")


def is_being_written(directory: Path) -> bool:
    """Return whether ``directory`` has the temporary name of a save that runs or was interrupted."""
    return directory.name.startswith(".") and directory.name.endswith(WRITING)


def is_replaced(directory: Path) -> bool:
    """Return whether ``directory`` has the temporary name of a checkpoint that a save of the same tag replaces."""
    return directory.name.startswith(".") and directory.name.endswith(REPLACED)


def is_without_name(directory: Path) -> bool:
    """Return whether a save was killed after it moved the older checkpoint away, before it moved its own there."""
    if directory.exists():
        return False
    return beside(directory, REPLACED).is_dir() and beside(directory, WRITING).is_dir()


def take_back(directory: Path) -> None:
    """Move the older checkpoint back to ``directory`` if :func:`is_without_name`. Ranks may call it concurrently."""
    if is_without_name(directory):
        with suppress(FileNotFoundError):  # another rank was faster
            os.rename(beside(directory, REPLACED), directory.resolve())


def is_of_checkpoint(name: str) -> bool:
    """Return whether a file of this ``name`` is part of a checkpoint of either format."""
    return name == METADATA or bool(_NAME.fullmatch(name)) or name.endswith((".distcp", "_states.pt"))


def ranks_in(directory: Path) -> list[int]:
    """Return the ranks that have a manifest in the ``directory`` of a tag."""
    return sorted(int(found[1]) for entry in os.scandir(directory) if (found := _NAME.fullmatch(entry.name)))


def read_any(directory: Path, rank: int) -> Manifest | None:
    """Return the manifest of ``rank``, or that of another rank if it left none; ``None``: there is no manifest."""
    if path_of(directory, rank).exists():
        return _read(directory, rank)
    others = ranks_in(directory)
    return _read(directory, others[0]) if others else None


def _read(directory: Path, rank: int) -> Manifest:
    path = path_of(directory, rank)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        files = {name: FileState(**state) for name, state in content.pop("files").items()}
        manifest = Manifest(**content, files=files)
    except FileNotFoundError:
        raise DamageError(f"{path.name} is missing") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(path, error) from None
    if manifest.rank != rank:
        raise DamageError(f"{path.name} is that of rank {manifest.rank}")
    return manifest


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def check(directory: Path, ranks: Iterable[int], contents: bool, shards: bool = True) -> None:
    """Check the files that ``ranks`` have written to the ``directory`` of a tag; optimizer shards only with ``shards``.

    Raises a ``DamageError`` if the save was interrupted, or files have changed since, or are of different saves. Files
    are read only with ``contents``.
    """
    manifests = [_read(directory, rank) for rank in ranks]
    for manifest in manifests:
        first, name = manifests[0], path_of(directory, manifest.rank).name
        if not manifest.is_complete:
            raise DamageError(f"the save was interrupted: {name} of step {manifest.step} is not complete")
        if (manifest.save, manifest.ranks) != (first.save, first.ranks):
            raise DamageError(
                f"it has files of two saves: {path_of(directory, first.rank).name} is of step {first.step}, {name} of"
                f" step {manifest.step} (saves {first.save} and {manifest.save})"
            )
    for manifest in manifests:
        for name, state in manifest.files.items():
            path = directory / name
            if shards or not path.match(SHARDS):
                state.check(path, contents)


def check_whole(directory: Path, contents: bool) -> Manifest | None:
    """:func:`check` the files of all ranks in the ``directory`` of a tag; ``None``: there is no manifest."""
    manifest = read_any(directory, 0)
    if manifest is not None:
        check(directory, range(manifest.ranks), contents)
    return manifest


def newest_whole(directory: Path, tag: str) -> Path | None:
    """Return the newest whole checkpoint in ``directory``, or under the same ``tag`` in a sibling of ``directory``.

    Frameworks may have a directory per checkpoint, hence the siblings. The contents of files are not read.
    """
    siblings = _folders(directory.absolute().parent) if tag else ()
    whole: dict[Path, float] = {}
    for place in (*_folders(directory), *(folder / tag for folder in siblings)):
        try:
            if place.is_dir() and (manifest := check_whole(place, contents=False)):
                whole[place] = manifest.time
        except (DamageError, OSError):
            pass
    return max(whole, key=lambda place: whole[place], default=None)


def _folders(directory: Path) -> Iterator[Path]:
    if directory.is_dir():
        yield from (entry for entry in directory.iterdir() if entry.is_dir() and not is_being_written(entry))


def read_tag(file: Path) -> str:
    """Return the tag that ``file`` (as ``latest``) names; a ``DamageError`` if it cannot be read or is empty."""
    try:
        tag = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DamageError(f"the file {str(file)!r} cannot be read ({in_words(error)})") from None
    if not tag:
        raise DamageError(f"the file {str(file)!r}, which names the tag to load, is empty")
    return tag
