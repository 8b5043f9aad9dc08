"""A verdict on a hang before the process group's timeout ends the process, on any backend (W4).

On NCCL, the host does not wait in collectives. If ranks wait for each other in vain, no error is raised until torch's
watchdog ends the process. So a thread observes whether the main thread makes progress. If it makes none for half of the
timeout and waits for other ranks, this rank asks all ranks and prints the report. Nothing is sent before.

::

    moving --- no progress for ``patience`` seconds, and it waits for others ---> reported
      ^                                                                             |
      +---------------------------- the main thread moves --------------------------+
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from zerosync_strategy.core.failures.words import Report

LEAST_SECONDS = 30.0
"""Least patience. A process group with a shorter one has no watch, because its error comes soon enough."""
_LOOKS = 10
"""Number of looks in ``patience`` seconds."""


class HangWatch:
    """Watches the main thread of this process, which has not moved if ``moves`` returns the same number again.

    ``waits`` returns whether it waits for other ranks now, and may take a second. ``ask`` returns the report.
    """

    def __init__(
        self, patience: float, moves: Callable[[], int], waits: Callable[[], bool], ask: Callable[[], Report]
    ) -> None:
        self._patience, self._moves, self._waits, self._ask = patience, moves, waits, ask
        self._last, self._since, self._reported = -1, time.monotonic(), False
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="zerosync-hang-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while not self._ended.wait(self._patience / _LOOKS):
            if self.is_stuck():
                self.tell(self._ask())

    def is_stuck(self) -> bool:
        """Return whether the main thread waits for others and has not moved for long, and this is not reported yet."""
        moves = self._moves()
        with self._lock:
            if moves != self._last:
                self._last, self._since, self._reported = moves, time.monotonic(), False
        return not self._reported and time.monotonic() - self._since >= self._patience and self._waits()

    def tell(self, found: Report) -> None:
        """Print the report, once until the main thread moves again."""
        with self._lock:
            if self._reported:
                return
            self._reported = True
        waited = f"ZeroSync: this rank has waited for others for {time.monotonic() - self._since:.0f} s."
        print(f"{waited}\n{found.text}", file=sys.stderr, flush=True)
