"""Processes that need each other: started together, and ended when one has failed or time is up."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GRACE = 10.0
"""Seconds that the others have to end by themselves when one has failed."""


@dataclass(frozen=True)
class Ended:
    """A process that has ended, or was ended.

    Attributes:
        status: its exit status; ``None`` where time was up.
        last_line: of its errors, with the name of an exception if there is one.
    """

    status: int | None
    output: str
    last_line: str

    @property
    def how(self) -> str:
        return "not ended" if self.status is None else f"ended with status {self.status}"


def run_together(
    commands: Sequence[Sequence[str]], timeout: float, environments: Sequence[Mapping[str, str] | None]
) -> list[Ended]:
    """Run ``commands`` at once, each in one of ``environments``, for ``timeout`` seconds at most."""
    with tempfile.TemporaryDirectory(prefix="zerosync-") as folder:
        outputs = [Path(folder) / f"process{index}" for index in range(len(commands))]
        processes = []
        for command, environment, file in zip(commands, environments, outputs, strict=True):
            with file.open("w") as out, file.with_suffix(".err").open("w") as err:
                started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment)
                processes.append(started)
        try:
            deadline = time.monotonic() + timeout
            while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
                if any(process.poll() for process in processes):
                    deadline = min(deadline, time.monotonic() + GRACE)
                time.sleep(0.1)
            statuses = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [
            Ended(status, file.read_text(errors="replace"), _last_line(file.with_suffix(".err")))
            for status, file in zip(statuses, outputs, strict=True)
        ]


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip(" =-")]
    named = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return (named or lines or ["no output"])[-1].strip()[:300]
