"""Loading: all ranks verify the files and agree on the checkpoint before anything is changed (K2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from zerosync_strategy.core.checkpoints import manifests
from zerosync_strategy.core.checkpoints.manifests import LATEST, DamageError, Manifest
from zerosync_strategy.core.comm.collectives import broadcast_object
from zerosync_strategy.core.failures.agreement import together
from zerosync_strategy.core.failures.errors import AS_MANY, NOTHING_LOADED, OTHER_SETUP
from zerosync_strategy.core.failures.rank_status import rank_status


@dataclass(frozen=True)
class SavedCheckpoint:
    """The checkpoint that an engine loads.

    Attributes:
        directory, tag: arguments of ``load_checkpoint``; without a tag, the file ``latest`` names it.
        checksums: read all files to verify them.
        shards: the optimizer's shards are read, too.
        any_ranks: another number of ranks may have written it.
        weights_of_latest: DeepSpeed loads the weights of the tag in the file ``latest``, even if ``tag`` is another.
        files: returns the files that this rank reads first, by the folder of the tag.
    """

    directory: Path
    tag: str | None
    checksums: bool
    shards: bool = True
    any_ranks: bool = True
    weights_of_latest: bool = False
    files: Callable[[Path], Sequence[Path]] | None = None


_verified: dict[tuple[Path, str | None], str | None] = {}  # the tag, by directory and requested tag


def verify(source: SavedCheckpoint) -> str | None:
    """Return the tag that all ranks load; ``None`` if no tag was asked for and there is no file ``latest``. Collective.

    Every rank raises a ``CheckpointError``, with nothing changed, if one cannot load it or if ranks would load
    different ones.
    """
    key = source.directory, source.tag
    return _verified[key] if key in _verified else _agree([source])[0]


@contextmanager
def one_load(sources: Sequence[SavedCheckpoint]) -> Iterator[None]:
    """Around calls that load ``sources`` of one save: all are verified before the first is loaded. Collective."""
    with rank_status().activity(f"the attempt to read the checkpoint in {sources[0].directory}"):
        tags = _agree(sources)
    _verified.update({(source.directory, source.tag): tag for source, tag in zip(sources, tags, strict=True)})
    try:
        yield
    finally:
        _verified.clear()


def _agree(sources: Sequence[SavedCheckpoint]) -> list[str | None]:
    first = sources[0]

    def examine() -> tuple[str, list[str | None]]:
        found = [(tag := tag_of(source), _manifest_of(source, tag)) for source in sources]
        saves = {manifest.save: source for source, (_, manifest) in zip(sources, found, strict=True) if manifest}
        if len(saves) > 1:
            raise DamageError(
                "the parts of the checkpoint are of different saves: "
                + ", ".join(f"{source.directory} of {save}" for save, source in saves.items())
            )
        facts = [_in_words(tag, manifest) for tag, manifest in found]
        return ", ".join(facts), [tag for tag, _ in found]

    return together(f"read the checkpoint in {first.directory}", examine, lambda: _remedy(first))


def _in_words(tag: str | None, manifest: Manifest | None) -> str:
    name = f"no file {LATEST!r}" if tag is None else f"tag {tag!r}"
    return f"{name}, no manifest" if manifest is None else f"{name} of step {manifest.step} (save {manifest.save})"


def _remedy(source: SavedCheckpoint) -> str:
    """Return the remedy: that nothing was loaded, and the newest whole checkpoint. Collective."""
    text = ""
    if dist.get_rank() == 0:
        try:
            tag = tag_of(source)
        except DamageError:
            tag = None
        newest = manifests.newest_whole(source.directory, tag or "")
        if newest is not None:
            how = f"tag={newest.name!r}" if newest.parent == source.directory else str(newest.parent)
            text = f" The newest checkpoint there that is whole: {how}."
    return NOTHING_LOADED + str(broadcast_object(text, 0, None))


def tag_of(source: SavedCheckpoint) -> str | None:
    """Return the tag to load; ``None`` if nothing names one; a ``DamageError`` if its directory does not exist."""
    directory, tag, latest = source.directory, source.tag, source.directory / LATEST
    named = ""
    if tag is None:
        if not latest.is_file():
            return None
        tag = manifests.read_tag(latest)
        named = f", which the file {str(latest)!r} names"
    manifests.take_back(directory / tag)
    if (directory / tag).is_dir():
        reads_latest = source.weights_of_latest and not manifests.is_distributed(directory / tag)
        if reads_latest and (other := manifests.read_tag(latest)) != tag:
            raise DamageError(
                f"under ZeRO-3 without optimizer states, DeepSpeed loads the weights of the tag that the file"
                f" {str(latest)!r} names, which is {other!r} and not {tag!r}. Name {tag!r} in it, or load the optimizer"
                " states, too"
            )
        return tag
    if not directory.is_dir():
        raise DamageError(f"{directory} is no directory. Give the one that save_checkpoint() was called with")
    tags = ", ".join(sorted(repr(entry.name) for entry in directory.iterdir() if entry.is_dir())) or "none"
    raise DamageError(f"it has no tag {tag!r}{named}. Give a tag= that it has ({tags}), or another directory")


def _manifest_of(source: SavedCheckpoint, tag: str | None) -> Manifest | None:
    """Verify this rank's share of the files; return a manifest of the checkpoint, or ``None`` if it has none.

    Each file is verified by one rank: the one that has written it, or if the number of ranks differs, one of those that
    divide the files among them.
    """
    if tag is None:
        return None
    folder, rank, ranks = source.directory / tag, dist.get_rank(), dist.get_world_size()
    is_distributed = manifests.is_distributed(folder)
    manifest = manifests.read_any(folder, rank)
    if manifest is not None:
        if not source.any_ranks and manifest.ranks != ranks and not is_distributed:
            raise DamageError(f"it was written by {manifest.ranks} ranks, and this run has {ranks}. {AS_MANY}")
        manifests.check(folder, range(rank, manifest.ranks, ranks), source.checksums, source.shards)
    for path in source.files(folder) if source.files is not None and not is_distributed else ():
        if not path.is_file():
            raise DamageError(f"{path.name} is missing. {OTHER_SETUP}")
        if manifest is None:
            manifests.check_unlisted(path, source.checksums)
    return manifest
