"""Whether checkpoints on the disk are whole: what a run would find that loads them (K1)."""

from __future__ import annotations

from pathlib import Path

from zerosync_strategy.core.checkpoints import manifests
from zerosync_strategy.core.checkpoints.manifests import LATEST, DamageError, Manifest
from zerosync_strategy.tools.doctor.findings import Finding, Topic

TOPIC = Topic("checkpoint")


def check(directory: Path) -> list[Finding]:
    """Verify all files of every checkpoint in ``directory``, or below it, and the files that name one.

    Raises:
        ValueError: there is none.
    """
    folders = sorted(
        {path.parent for pattern in ("zerosync_rank_*.json", manifests.MODULES) for path in directory.rglob(pattern)}
    )
    if not folders:
        raise ValueError(f"{directory} has no checkpoint of DeepSpeed's, of one tag or of several")
    whole: dict[Path, Manifest | None] = {}
    damaged: dict[Path, str] = {}
    for folder in folders:
        try:
            whole[folder] = manifests.check_whole(folder, contents=True)
            if whole[folder] is None:
                for path in sorted(folder.glob("*.pt")):
                    manifests.check_unlisted(path, contents=True)
        except (DamageError, OSError) as problem:
            whole.pop(folder, None)
            damaged[folder] = str(problem)
    known = {folder: manifest.time for folder, manifest in whole.items() if manifest is not None}
    newest = max(known, key=known.__getitem__, default=None)
    remedy = "None here is known to be whole." if newest is None else f"The newest that is whole is {newest}: load it."
    found = [
        TOPIC.error(f"{folder}: {damaged[folder]}", remedy) if folder in damaged else _of_whole(folder, whole[folder])
        for folder in folders
    ]
    return found + [
        each for path in sorted(directory.rglob(LATEST)) if path.is_file() for each in _of_latest(path, remedy)
    ]


def _of_whole(folder: Path, manifest: Manifest | None) -> Finding:
    if manifest is None:
        return TOPIC.note(
            f"{folder}: has no manifests, so that nobody can tell whether its files belong together; what they have of"
            " checksums is right",
            "Checkpoints of ZeroSync have manifests; those of stock DeepSpeed and of earlier releases do not.",
        )
    size = sum(path.stat().st_size for path in folder.glob("*.pt"))
    return TOPIC.ok(
        f"{folder}: whole; step {manifest.step}, {manifest.ranks} ranks, {size / 1e6:,.1f} MB, save {manifest.save}",
    )


def _of_latest(path: Path, remedy: str) -> list[Finding]:
    try:
        tag = manifests.read_tag(path)
        if (path.parent / tag).is_dir():
            return []
        problem = f"the file {str(path)!r} names the tag {tag!r}, which is not there"
    except DamageError as damage:
        problem = str(damage)
    return [TOPIC.error(problem, f"Write the name of a tag into it, or give a tag=. {remedy}")]
