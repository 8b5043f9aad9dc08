"""A stderr on which a test sees the verdict that a rank prints while it waits."""

import io
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.harness.engines import rank
from zerosync_strategy.core.failures import rank_status

LOOK = 0.4  # seconds


class Told(io.StringIO):
    """Writes a verdict to a file, too, and calls `then` with it."""

    def __init__(self, path: Path, then: Callable[[], Any]) -> None:
        super().__init__()
        self.path, self.then = path, then

    def write(self, text: str) -> int:
        written = super().write(text)
        if "Verdict" in text:
            new = self.path.with_suffix(".new")
            new.write_text(text)
            new.rename(self.path)
            self.then()
        return written


def told_by(number: int, folder: Path) -> Path:
    """The file with the verdict that a rank has printed."""
    return folder / f"told {number}"


def look_often(folder: Path, then: Callable[[], Any] = lambda: None) -> Told:
    """Let this rank, whose process group has begun, look every `LOOK`."""
    rank_status.LOOK_SECONDS = LOOK
    dist.barrier()  # else the first to begin would look at others that have not
    sys.stderr = told = Told(told_by(rank(), folder), then)
    return told


def end_soon() -> None:
    """End this process: it waits in vain, and the others are about to print the same."""
    threading.Timer(1.0, os._exit, [0]).start()
