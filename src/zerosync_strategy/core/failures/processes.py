"""Which processes of this host have ended: the system knows, also of one whose threads answer nobody."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process of a host. Its start tells it from a later one with the same ``pid``; empty: unknown."""

    pid: int
    started: str

    @property
    def has_ended(self) -> bool:
        """Whether it has ended. Only of a process of this host, in the same namespace."""
        return bool(self.started) and _started(self.pid) != self.started


def this_process() -> Process:
    """Return the process that calls this."""
    return Process(os.getpid(), _started(os.getpid()) if host() else "")


def host() -> str:
    """Return words for the kernel and the namespace of process ids; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return when a process has started, in the system's ticks; empty if it is no more, or ends."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in "ZX" else fields[18]
