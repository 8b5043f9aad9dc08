"""Where the time of an optimizer step goes, phase by phase, on the thread that runs the program.

Forward, backward and step are marked by the systems. Parts of them are found by their names in torch's profiler: what
ZeroSync names itself, and the step of the torch optimizer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

INNER = {
    "wait for reductions": ("zerosync::wait_reduce_scatter",),
    "norm": ("zerosync::norm",),
    "optimizer": ("Optimizer.step#",),
    "wait for gathers": ("zerosync::wait_gather",),
}
"""Phases inside of others, by the beginning of their names in a profile."""
_seconds: dict[str, list[float]] = {}  # of a marked phase: by the clock, and of the processor


@contextmanager
def of(name: str) -> Iterator[None]:
    """Mark a phase."""
    began, worked = time.perf_counter(), time.thread_time()
    yield
    seconds = _seconds.setdefault(name, [0.0, 0.0])
    seconds[0] += time.perf_counter() - began
    seconds[1] += time.thread_time() - worked


class Phases:
    """Seconds by phase, over the steps that were watched."""

    def __init__(self) -> None:
        self._steps: list[dict[str, float]] = []

    @contextmanager
    def watching(self, profiled: bool) -> Iterator[None]:
        """Around a step. Profiled, its time is not that of others, and only what is inside of phases is taken."""
        _seconds.clear()
        if not profiled:
            yield
            step = {name: clock for name, (clock, _) in _seconds.items()}
            step |= {f"{name}, not working": clock - worked for name, (clock, worked) in _seconds.items()}
            self._steps.append(step)
            return
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            yield
        inner = dict.fromkeys(INNER, 0.0)
        for event in profile.events():
            for name, beginnings in INNER.items():
                if event.name.startswith(beginnings):
                    inner[name] += event.cpu_time_total / 1e6
        self._steps.append(inner)

    def medians(self) -> dict[str, float]:
        """Return, by phase, the median over the steps."""
        names = dict.fromkeys(name for step in self._steps for name in step)
        return {
            name: torch.tensor([step[name] for step in self._steps if name in step]).median().item() for name in names
        }
