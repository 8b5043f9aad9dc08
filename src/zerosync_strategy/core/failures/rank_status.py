"""An error, or a printed verdict, that says what each rank was doing when communication failed or hung (W4).

Nothing is sent while communication works. In each process, a thread sleeps on a key of the process group's store. A
rank whose communication fails, or that waits in vain (:class:`HangWatch`), wakes all these threads, and each writes
what its own process is doing (``inquiry``). A rank that raises another error, or leaves, writes it to the store first.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from enum import IntEnum
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm import journal
from zerosync_strategy.core.comm.collectives import timeout_of
from zerosync_strategy.core.engine.types import Store
from zerosync_strategy.core.failures.errors import RankError, add_note, is_communication_error
from zerosync_strategy.core.failures.flight_recorder import Key
from zerosync_strategy.core.failures.inquiry import Inquiries
from zerosync_strategy.core.failures.rank_state import Phase, Progress, RankState, frame_of, observe
from zerosync_strategy.core.failures.words import Report, error_text, report, waiting_text

LOOK_SECONDS = 5.0
"""The time between two looks; less if the patience is short."""
_LOOKS = 6
"""The least number of looks in ``patience`` seconds."""


class _Told(IntEnum):
    NOTHING = 0
    REPORT = 1
    CERTAIN = 2


class HangWatch:
    """Verdicts on ranks that wait in vain, long before the process group's timeout, on any backend.

    On NCCL, the host does not wait in collectives: no error is raised until torch's watchdog ends the process. On gloo,
    one comes at the timeout. So a thread looks every few seconds whether the main thread makes progress: it has not
    moved if ``moves`` returns the same number again, and it waits for the same as before: a program's own collectives
    move it, too. If it waits for other ranks then, this rank asks all ranks (``inquiry``), at the first such look, the
    second, the fourth and so on. A certain report is printed at once, any other after ``patience`` seconds, each once
    until the main thread moves; none of an inquiry during which it has moved. Reports of other ranks' inquiries count::

        moving --- a look without progress, while it waits ---> stuck --- a report ---> told ---> told for certain
          ^                                                       |                       |               |
          +------------------- the main thread moves -------------+-----------------------+---------------+

    ``waits`` returns what it waits for now, empty if for no other rank, and may take a second. ``ask`` returns the
    report.
    """

    def __init__(
        self, patience: float, moves: Callable[[], int], waits: Callable[[], str], ask: Callable[[], Report]
    ) -> None:
        self._patience, self._moves, self._waits, self._ask = patience, moves, waits, ask
        self._pause = min(LOOK_SECONDS, patience / _LOOKS)
        self._last, self._since, self._looks, self._told = -1, time.monotonic(), 0, _Told.NOTHING
        self._waited_for = ""  # at the last look; empty: not looked at, or for nothing
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
        waits_for = self._waits() if moves == self._last else ""
        with self._lock:
            has_moved = not waits_for or self._waited_for not in ("", waits_for)
            self._last, self._waited_for = moves, waits_for
            if has_moved:
                self._since, self._told = time.monotonic(), _Told.NOTHING
        return not has_moved and self._told is not _Told.CERTAIN

    def hear(self, found: Report) -> None:
        """Print the report of an inquiry, if this rank still waits, and if it is certain or has waited for long."""
        if self._ended.is_set() or not self.is_stuck():
            return
        with self._lock:
            self._has_heard = True
            waited = time.monotonic() - self._since
            tells = _Told.CERTAIN if found.certain else _Told.REPORT if waited >= self._patience else _Told.NOTHING
            if tells <= self._told:
                return
            self._told = tells
        print(waiting_text(waited, found), file=sys.stderr, flush=True)


class RankStatus:
    """What this process is doing, and its report to other ranks through the ``store`` when one of them fails.

    ``patience``: seconds without progress after which a rank prints what all ranks do; zero: no watch.
    """

    def __init__(self, store: Store, rank: int, world_size: int, patience: float = 0) -> None:
        self._rank = rank
        self._activities: list[tuple[object, float]] = []  # innermost last, each with its start time
        self._position = "before its first optimizer step"
        self._progress: Callable[[], Progress | None] = lambda: None
        self._moves = 0  # of the main thread, into or out of an activity
        self._stopped: RankState | None = None  # the reported state, while LOST, STOPPED or FAILED
        self._main = threading.main_thread().ident or 0
        self._inquiries: Inquiries | None = None
        with suppress(RuntimeError):  # a store that cannot be shared; then errors describe this rank only
            self._inquiries = Inquiries(store, rank, world_size, self._state, self._heard)
        self._watch: HangWatch | None = None
        if self._inquiries is not None and world_size > 1 and patience > 0:
            ask = partial(self._inquiries.ask, connect=True)
            self._watch = HangWatch(patience, lambda: self._moves, self._waits, ask)
        atexit.register(self._exit)

    def activity(
        self, what: object, position: Callable[[], str] | None = None, progress: Progress | None = None
    ) -> AbstractContextManager[None]:
        """Around what may communicate; replaces a communication error by a ``RankError``.

        Args:
            what: what this rank does; converted to text only when something fails.
            position: returns the rank's progress in words; ``None``: unchanged.
            progress: the progress for the verdict; ``None``: unchanged.
        """
        return Activity(self, what, position, progress)

    def _raised(self, what: object, error: BaseException) -> None:
        """Record an ``error`` in ``what``; a communication error is raised as a ``RankError``."""
        if isinstance(error, RankError) or not isinstance(error, Exception):
            return
        if isinstance(error, torch.OutOfMemoryError) and (progress := self._progress()) is not None:
            add_note(error, progress.memory())
        if is_communication_error(error):
            message = self.describe(str(what), error)
            self.record_failure(f"lost the other ranks in {what}")
            raise RankError(message) from error
        self.record_failure(f"{type(error).__name__} in {what}", error)

    def record_failure(self, why: str, error: BaseException | None = None, goes_on: bool = True) -> None:
        """Write to the store ``why`` this rank stops, for the ranks that will wait for it.

        Without an ``error``, or with a communication error, the rank has lost the others. ``goes_on``: the program may
        catch the error; then torch's flight recorder is not read, because that takes time.
        """
        if self._stopped is not None and self._stopped.phase is not Phase.LOST:
            return  # the first record, from the innermost activity, is the most specific
        waited = error is not None and is_communication_error(error)
        frame = None if error is None else frame_of(error)
        state = self._stopped or self._observe(frame, failed=waited, with_recorder=not goes_on)
        if error is None or waited:
            self._stop(replace(state, phase=Phase.STOPPED, failure=why, seconds=-1))
        else:
            self._stop(replace(state, phase=Phase.FAILED, failure=why, seconds=-1, waits_for=""))

    @property
    def has_stopped(self) -> bool:
        """Whether the last activity of this rank has failed, or has lost the other ranks; not if it has left them."""
        return self._stopped is not None and self._stopped.phase is not Phase.GONE

    def _stop(self, state: RankState | None) -> None:
        """Report the ``state`` in which this rank has stopped; ``None``: it continues."""
        self._stopped = state
        if self._inquiries is not None:
            self._inquiries.record_failure(state)

    def describe(self, what: str, error: BaseException) -> str:
        """Return the error text for a communication ``error`` in ``what``. Takes some five seconds."""
        self._stopped = lost = self._observe(frame_of(error), failed=True)
        found = report([lost]) if self._inquiries is None else self._inquiries.ask()
        # A rank that asks later gets this verdict: by then, other ranks may have stopped because this one did.
        self._stopped = replace(lost, verdict=found.verdict, advises=found.advises)
        return error_text(self._rank, what, self._position, error, found)

    def uncaught(self, error: object) -> None:
        """Record that the program ends with ``error``, if that is an exception."""
        if isinstance(error, Exception):
            self.record_failure(f"{type(error).__name__} outside of the engine", error, goes_on=False)

    def _exit(self) -> None:
        self.uncaught(getattr(sys, "last_value", None))
        self.leave()

    def leave(self) -> None:
        """Record that this rank has left the process group, unless it has stopped or left before, and :meth:`end`."""
        if self._stopped is None and self._inquiries is not None:
            self._stop(replace(self._observe(None, with_recorder=False), phase=Phase.GONE, waits_for=""))
        self.end()

    def end(self) -> None:
        """End the threads and release the store. A second call does nothing."""
        atexit.unregister(self._exit)
        if self._watch is not None:
            self._watch.end()
        if self._inquiries is not None:
            self._inquiries.end()
        self._watch = self._inquiries = None

    def _waits(self) -> str:
        state = self._state().with_pending()
        return state.waits_for and f"{state.waits_for} {state.wait.key if state.wait else ''}"

    def _heard(self, summary: Callable[[], Report]) -> None:
        """Take the report of another rank's inquiry, if this rank waits, too."""
        if self._watch is not None and self._watch.is_stuck():
            self._watch.hear(summary())

    def _state(self, asked: Sequence[Key] = ()) -> RankState:
        # No variable holds the frame: it may be this function's own, and would then refer to itself.
        return self._stopped or self._observe(sys._current_frames().get(self._main), asked=asked)

    def _observe(self, frame: FrameType | None, **how: Any) -> RankState:
        return observe(self._rank, list(self._activities), frame, self._position, self._progress(), **how)


class Activity(AbstractContextManager[None]):
    """The context of what may communicate, as :meth:`RankStatus.activity` returns it; for any number of uses.

    Without further calls, because each gather has one.
    """

    def __init__(
        self, status: RankStatus, what: Any, position: Callable[[], str] | None = None, progress: Progress | None = None
    ) -> None:  # fmt: skip
        self._status, self.what, self._position, self._progress = status, what, position, progress

    def __enter__(self) -> None:
        status = self._status
        if self._position is not None:
            status._position = self._position()
        if self._progress is not None:
            status._progress = weakref.ref(self._progress)  # weak, so as not to keep the engine
        if status._stopped is not None:
            status._stop(None)
        status._moves += 1
        status._activities += ((self.what, time.monotonic()),)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is not None:
                self._status._raised(self.what, error)
        finally:
            status = self._status
            status._moves += 1
            del status._activities[-1]
            if self._position is not None:
                status._position = self._position()


_current: tuple[Callable[[], Any], RankStatus] | None = None  # with a weak reference to its process group


def rank_status() -> RankStatus:
    """Return the status of this process in its default process group. The status of an earlier group ends."""
    global _current
    group = dist.distributed_c10d._get_default_group()
    if _current is None or _current[0]() is not group:
        if _current is not None:
            _current[1].end()
            journal.reset()
        store = dist.distributed_c10d._get_default_store()
        patience = timeout_of(None).total_seconds() / 2
        status = RankStatus(store, dist.get_rank(), dist.get_world_size(), patience)
        weakref.finalize(group, status.leave).atexit = False  # it holds the store, which may be hosted here
        _current = weakref.ref(group), status
    return _current[1]
