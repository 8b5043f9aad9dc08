"""What on this machine lets a run hang or fail before its first step."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from zerosync_strategy.tools.doctor.findings import Finding, note, or_ok, warning

TOPIC = "machine"
LEAST_SHARED_MEMORY = 1 << 30
"""Bytes of /dev/shm below which data loaders and NCCL run out of it; containers have 64 MiB unless told otherwise."""


def check(shared_memory: Path = Path("/dev/shm"), extensions: Path | None = None) -> list[Finding]:
    """Look at shared memory, at locks of compilations that have ended, and at what compiles DeepSpeed's operators.

    Args:
        shared_memory: where it is mounted.
        extensions: where torch compiles; by default ``TORCH_EXTENSIONS_DIR`` or torch's own default.
    """
    if extensions is None:
        extensions = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    found = [*_shared_memory(shared_memory), *_locks(extensions), *_compiler()]
    return or_ok(found, TOPIC, "shared memory, ninja and a C++ compiler are there, and no compilation holds a lock")


def _shared_memory(path: Path) -> Iterator[Finding]:
    if not path.is_dir():
        yield warning(TOPIC, f"{path} is not there", f"Mount a tmpfs at {path}; data loaders with workers need it.")
        return
    usage = shutil.disk_usage(path)
    if usage.free < LEAST_SHARED_MEMORY:
        yield warning(
            TOPIC,
            f"{path} has {usage.free >> 20} MiB left of {usage.total >> 20}; data loaders with workers, and NCCL within"
            " a node, fail with a bus error when it is full",
            "Give the container more (docker run --shm-size=8g, or --ipc=host), or remove what earlier runs left.",
        )


def _locks(extensions: Path) -> Iterator[Finding]:
    if not extensions.is_dir():
        return
    for lock in sorted(extensions.glob("**/lock")):
        minutes = (time.time() - lock.stat().st_mtime) / 60
        yield warning(
            TOPIC,
            f"{lock} has been held for {minutes:.0f} min: a run that compiles the same operator waits for it, and for"
            " ever if the run that made it was killed",
            f"If no run is compiling now: rm {lock}",
        )


def _compiler() -> Iterator[Finding]:
    compiler = os.environ.get("CXX", "c++")
    for tool, install in (("ninja", "pip install ninja"), (compiler, "install g++, or set CXX")):
        if shutil.which(tool) is None:
            yield note(
                TOPIC,
                f"{tool} is not on PATH; DeepSpeed's own operators (FusedAdam, CPUAdam, NVMe) cannot be compiled."
                " Torch's optimizers need none of them",
                f"To use them: {install}. In a virtual environment, activate it, so that its bin is on PATH.",
            )
