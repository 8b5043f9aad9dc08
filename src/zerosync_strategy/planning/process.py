"""What a process must do before its memory says what its tensors take."""

from __future__ import annotations

import contextlib
import ctypes
import os
from importlib import import_module

from zerosync_strategy.planning.jobs import LARGE_BYTES

_M_MMAP_THRESHOLD = -3
# What torch, DeepSpeed and ZeroSync import when they are first used.
_NAMES = (
    "deepspeed", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.tensor", "torch.onnx",
    "torch.export", "torch.testing._internal.distributed.fake_pg", "zerosync_strategy.core.handle",
    "zerosync_strategy.planning.models", "zerosync_strategy.planning.skipped", "zerosync_strategy.planning.memory",
)  # fmt: skip


def import_all() -> None:
    """Import it now: for forks, which then need not; and before memory is measured, of which code takes 70 MB."""
    for name in _NAMES:
        with contextlib.suppress(ImportError):
            import_module(name)


def map_large_blocks() -> None:
    """Let the C library ask the system for each large block: it is of zeros, and goes back as soon as it is freed.

    Without it, freed memory is kept for later, and resident memory is not what is in use. Not on other libraries than
    GNU's.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
