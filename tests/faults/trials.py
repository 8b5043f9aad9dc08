"""One fault in one run: how every rank ends, and whether the last good checkpoint carries on."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.jobs import FAULT_AT, JOBS, PLACES, fault
from tests.harness.oracle import distance
from tests.harness.ranks import RankOutcome, run_ranks

FAULTS = (
    *[("exception", place) for place in PLACES],
    *[("SIGKILL", place) for place in PLACES],
    ("SIGTERM", "forward"),
    ("out of memory", "reduction"),
    ("NaN", "backward"),
    ("full disk", "checkpoint"),
)
DAMAGES = ("truncated", "foreign")


@dataclass(frozen=True)
class Trial:
    """What a fault led to.

    `outcomes` is by rank, `seconds` from the fault to the end of the last rank, `resumes` whether a run from the last
    good checkpoint ends with the parameters of one that nothing disturbed, bit for bit.
    """

    outcomes: list[RankOutcome]
    seconds: float
    resumes: bool


def try_fault(framework: str, stage: int, kind: str, place: str, world_size: int = 2, victim: int = 1) -> Trial:
    """Train, fail on `victim`, and resume."""
    job = JOBS[framework]
    with _directory() as scratch, _small_disk(scratch) if kind == "full disk" else _directory() as disk:
        injected_at, saved = scratch / "injected_at", disk / "run"

        def fail() -> Any:
            mine = int(os.environ["RANK"]) == victim
            return job(stage, saved, (place, fault(kind, injected_at, disk)) if mine else None)

        outcomes = run_ranks(fail, world_size=world_size, expect="any", timeout=120)
        seconds = max(outcome.ended_at for outcome in outcomes) - float(injected_at.read_text())
        (disk / "other data").unlink(missing_ok=True)
        _forget_after(saved, FAULT_AT)
        return Trial(outcomes, seconds, resumes(framework, stage, saved, world_size))


def try_damaged(framework: str, stage: int, damage: str) -> Trial:
    """Train to the end, damage the last checkpoint, resume from it; then from the one before."""
    job = JOBS[framework]
    with _directory() as saved:
        run_ranks(job, stage, saved)
        first, *_, last = sorted(saved.glob("step*"), key=_step)
        for file in sorted(path for path in last.rglob("*") if path.is_file()):
            if damage == "truncated" and file.name.startswith(("bf16", "zero", "mp_rank", "model")):
                os.truncate(file, file.stat().st_size // 2)
            if damage == "foreign" and "rank_1" in file.name and file.suffix == ".pt":  # of another step
                shutil.copy(first / file.relative_to(last), file)
        outcomes = run_ranks(job, stage, saved, expect="any", timeout=120)
        _forget_after(saved, FAULT_AT)
        return Trial(outcomes, 0.0, resumes(framework, stage, saved))


def resumes(framework: str, stage: int, saved: Path, world_size: int = 2) -> bool:
    """Whether a run from what `saved` has ends as one that nothing disturbed: to the bit, as it computes the same."""
    job = JOBS[framework]
    with _directory() as other:
        undisturbed = run_ranks(job, stage, other, world_size=world_size)
    resumed = run_ranks(job, stage, saved, world_size=world_size)
    return all(distance(a, b) == 0.0 for a, b in zip(resumed, undisturbed, strict=True))


def _step(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("step").removeprefix("="))


def _forget_after(saved: Path, step: int) -> None:
    """Remove the checkpoints of later steps, which are bad or half-written, as a user would."""
    latest = saved / "latest"
    for checkpoint in saved.glob("step*"):
        if _step(checkpoint) > step:
            shutil.rmtree(checkpoint)
            if latest.exists() and latest.read_text() == checkpoint.name:
                latest.write_text(f"step{step}")


@contextmanager
def _directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _small_disk(scratch: Path) -> Iterator[Path]:
    """A file system of one MiB. Needs root."""
    path = scratch / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)
