"""Where the time of an optimizer step goes, phase by phase, on the thread that runs the program.

The systems mark the forward, the backward and the step. A thread that is in one of them and does not work waits: for
other ranks, or for a processor.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

_seconds: dict[str, list[float]] = {}  # of a marked phase, since the last step: by the clock, and of the processor


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
    def watching(self) -> Iterator[None]:
        """Around a step."""
        _seconds.clear()
        yield
        step: dict[str, float] = {}
        for name, (clock, worked) in _seconds.items():
            step |= {name: clock, f"{name}, not working": clock - worked}
        self._steps.append(step)

    def medians(self) -> dict[str, float]:
        """Return, by phase, the median over the steps."""
        names = self._steps[-1] if self._steps else {}
        return {name: median(step[name] for step in self._steps if name in step) for name in names}
