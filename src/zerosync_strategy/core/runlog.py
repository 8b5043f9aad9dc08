"""A log of what the optimizer steps of a real run took, for ``zerosync plan --check``."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import time
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.budgets.gauges import DeviceGauge, Gauge, ProcessGauge

LARGE_BYTES = 1 << 16
"""The system gives memory for each block of at least so many bytes, after :func:`map_large_blocks`."""
_M_MMAP_THRESHOLD = -3
# What torch, DeepSpeed and ZeroSync import when they are first used.
_NAMES = (
    "deepspeed", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.tensor", "torch.onnx",
    "torch.export", "torch.testing._internal.distributed.fake_pg", "zerosync_strategy.core.attaching",
)  # fmt: skip


def import_all() -> None:
    """Import it now: for forks, which then need not; and before memory is measured, of which code takes 70 MB."""
    for name in _NAMES:
        with contextlib.suppress(ImportError):
            import_module(name)


def map_large_blocks() -> None:
    """Let the C library ask the system for each large block: it is of zeros, and goes back as soon as it is freed.

    Without it, freed memory is kept for later, and resident memory is not what is in use. Only GNU's library has it.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


class DataGauge(ProcessGauge):
    """Resident memory without that of mapped files: the code of libraries, of which what has run so far is there."""

    def used(self) -> int:
        return super().used() - self._read("RssFile:")

    def peak(self) -> int:
        return super().peak() - self._read("RssFile:")


class RunLog:
    """Writes a line of JSON for each optimizer step of this rank. On Linux.

    Make it before the model is built: what this process holds then does not count. On CPU, this process
    returns large blocks to the system from now on as soon as they are freed.

    Args:
        file: gets the lines, from the first step on. On one rank only, or a file for each.
        ranks_of_machine: that share this machine's cores; by default what the launcher says, or all.

    Example::

        log = RunLog("run.jsonl")
        engine, *_ = deepspeed.initialize(...)
        zerosync = attach(engine)
        for ...:
            ...
            engine.step()
            log.step(zerosync)
    """

    def __init__(self, file: str | Path, ranks_of_machine: int | None = None) -> None:
        self._file = Path(file)
        self._lines: IO[str] | None = None
        self._mode = "w"
        self.ranks_of_machine = ranks_of_machine
        import_all()
        map_large_blocks()
        self._on_gpu = torch.cuda.is_available()
        self._gauge: Gauge = DeviceGauge(torch.device("cuda")) if self._on_gpu else DataGauge()
        self._before = self._gauge.used()
        self._began: float | None = None

    def step(self, zerosync: Any) -> None:
        """Note down the optimizer step that was just taken.

        Args:
            zerosync: the handle that ``attach()`` returned.
        """
        now, report = time.perf_counter(), zerosync.report
        if self._began is not None:
            line = {
                "step": report.step,
                "seconds": now - self._began,
                "backwards": report.backwards,
                "bytes_sent": report.bytes_sent,
                "peak_memory": self._gauge.peak() - self._before,
                "memory": "allocated" if self._on_gpu else "resident",
                "collectives": {kind: [each.calls, each.bytes] for kind, each in report.collectives.items()},
                "stage": int(zerosync.engine.zero_optimization_stage()),
                "options": {
                    name: getattr(zerosync.config, name) for name in ("grad_memory_budget", "param_memory_budget")
                },
                "ranks": dist.get_world_size(),
                "backend": "nccl" if self._on_gpu else "gloo",
                "ranks_of_machine": self.ranks_of_machine or _ranks_of_machine(),
                "threads": torch.get_num_threads(),
                "cores": len(os.sched_getaffinity(0)),
                "version": report.version,
            }
            if self._lines is None:
                self._lines = self._file.open(self._mode)
                self._mode = "a"
            self._lines.write(json.dumps(line) + "\n")
            self._lines.flush()
        self._gauge.restart_peak()
        self._began = time.perf_counter()

    def close(self) -> None:
        """Close the file. Further steps are added to it."""
        if self._lines is not None:
            self._lines.close()
        self._lines = self._began = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ranks_of_machine() -> int:
    said = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")  # of torchrun, of deepspeed
    return int(said) if said else dist.get_world_size()
