"""Verdicts on ranks that wait in vain, long before the process group's timeout, on any backend (W4).

On NCCL, the host does not wait in collectives: no error is raised until torch's watchdog ends the process. On gloo, one
comes at the timeout. So a thread looks every few seconds whether the main thread makes progress. Of one that does, it
compares a number. If the main thread has not moved since the last look and waits for other ranks, this rank asks all
ranks (``inquiry``), at the first such look, the second, the fourth and so on. A certain report is printed at once, any
other after ``patience`` seconds, each once until the main thread moves. What another rank has asked counts as well::

    moving --- a look without progress, while it waits ---> stuck --- a report ---> told ---> told for certain
      ^                                                       |                       |               |
      +------------------- the main thread moves -------------+-----------------------+---------------+
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from enum import IntEnum

from zerosync_strategy.core.failures.words import Report, waiting_text

LOOK_SECONDS = 5.0
"""The time between two looks; less if the patience is short."""
_LOOKS = 6
"""The least number of looks in ``patience`` seconds."""


class _Told(IntEnum):
    NOTHING = 0
    REPORT = 1
    CERTAIN = 2


class HangWatch:
    """Watches the main thread of this process, which has not moved if ``moves`` returns the same number again.

    ``waits`` returns whether it waits for other ranks now, and may take a second. ``ask`` returns the report.
    """

    def __init__(
        self, patience: float, moves: Callable[[], int], waits: Callable[[], bool], ask: Callable[[], Report]
    ) -> None:
        self._patience, self._moves, self._waits, self._ask = patience, moves, waits, ask
        self._pause = min(LOOK_SECONDS, patience / _LOOKS)
        self._last, self._since, self._looks, self._told = -1, time.monotonic(), 0, _Told.NOTHING
        self._has_heard = False  # a report since the last look
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="zerosync-hang-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while not self._ended.wait(self._pause):
            if self._has_to_ask():
                self.hear(self._ask())
                self._has_heard = False  # from itself

    def _has_to_ask(self) -> bool:
        """Look, and return whether this rank is stuck and it is time for an inquiry."""
        if not self.is_stuck():
            self._looks = 0
            return False
        self._looks += 1
        has_heard, self._has_heard = self._has_heard, False
        is_late = self._told is _Told.NOTHING and time.monotonic() - self._since >= self._patience
        return is_late or (not has_heard and self._looks & (self._looks - 1) == 0)

    def is_stuck(self) -> bool:
        """Return whether the main thread waits for others as at the last look, and no certain verdict is printed."""
        moves = self._moves()
        with self._lock:
            if moves != self._last:
                self._last, self._since, self._told = moves, time.monotonic(), _Told.NOTHING
                return False
        return self._told is not _Told.CERTAIN and self._waits()

    def hear(self, found: Report) -> None:
        """Print the report of an inquiry, if it is certain or this rank has waited for long."""
        with self._lock:
            self._has_heard = True
            waited = time.monotonic() - self._since
            tells = _Told.CERTAIN if found.certain else _Told.REPORT if waited >= self._patience else _Told.NOTHING
            if tells <= self._told:
                return
            self._told = tells
        print(waiting_text(waited, found), file=sys.stderr, flush=True)
