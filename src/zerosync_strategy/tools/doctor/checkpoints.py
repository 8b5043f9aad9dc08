"""Whether checkpoints on disk are whole, as a run that loads them would find (K1)."""

from __future__ import annotations

from pathlib import Path

from zerosync_strategy.core.checkpoints import manifests
from zerosync_strategy.core.checkpoints.manifests import LATEST, DamageError, Manifest
from zerosync_strategy.tools.doctor.findings import Finding, of_topic

ok, note, _, error = of_topic("checkpoint")


def check(directory: Path) -> list[Finding]:
    """Verify all files of every checkpoint in or below ``directory``, and the files ``latest``.

    Raises:
        ValueError: ``directory`` has no checkpoint.
    """
    patterns = ("zerosync_rank_*.json", manifests.MODULES, manifests.METADATA)
    folders = sorted({path.parent for pattern in patterns for path in directory.rglob(pattern)})
    if not folders:
        raise ValueError(f"{directory} has no checkpoint, of one tag or of several")
    whole: dict[Path, Manifest] = {}
    found: dict[Path, Finding | str] = {}  # text: the damage of a checkpoint
    for folder in folders:
        if manifests.is_being_written(folder):
            remedy = "Remove it if no run writes to it."
            found[folder] = note(f"{folder}: not complete; a save was interrupted, or runs now", remedy)
            continue
        if manifests.is_replaced(folder):
            remedy = "The next load or save under its tag gives it its name back, or removes it."
            found[folder] = note(f"{folder}: a save that was to replace it was interrupted, or runs now", remedy)
            continue
        try:
            found[folder] = _verify(folder, whole)
        except (DamageError, OSError) as problem:
            found[folder] = f"{folder}: {problem}"
    newest = max(whole, key=lambda folder: whole[folder].time, default=None)
    remedy = "None here is known to be whole." if newest is None else f"The newest that is whole is {newest}: load it."
    findings = [error(each, remedy) if isinstance(each, str) else each for each in found.values()]
    for path in sorted(directory.rglob(LATEST)):
        if path.is_file() and (wrong := _problem_of_latest(path)):
            findings.append(error(wrong, f"Write the name of a tag into it, or give a tag=. {remedy}"))
    return findings


def _verify(folder: Path, whole: dict[Path, Manifest]) -> Finding:
    manifest = manifests.check_whole(folder, contents=True)
    if manifest is not None:
        whole[folder] = manifest
        files = [path for path in folder.iterdir() if path.suffix in (".pt", ".distcp")]
        size = sum(path.stat().st_size for path in files) / 1e6
        return ok(
            f"{folder}: whole; step {manifest.step}, {manifest.ranks} ranks, {size:,.1f} MB, save {manifest.save}"
        )
    for path in sorted(folder.glob("*.pt")):
        manifests.check_unlisted(path, contents=True)
    return note(
        f"{folder}: has no manifests, so that nobody can tell whether its files belong together; what they have of"
        " checksums is right",
        "Checkpoints of ZeroSync have manifests; those of stock DeepSpeed and of earlier releases do not.",
    )


def _problem_of_latest(path: Path) -> str:
    try:
        tag = manifests.read_tag(path)
    except DamageError as damage:
        return str(damage)
    is_there = (path.parent / tag).is_dir() or manifests.is_without_name(path.parent / tag)
    return "" if is_there else f"the file {str(path)!r} names the tag {tag!r}, which is not there"
