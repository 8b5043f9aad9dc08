"""An error with lines that say what each rank was doing when communication failed (W4).

Nothing is sent while communication works. Each process has a thread that sleeps on a key of the process group's store.
A rank whose communication fails, or that waits in vain (``watch``), wakes all of them, and they write what their own
process is doing (``inquiry``). A rank that raises another error writes it to the store first.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any

import torch.distributed as dist

from zerosync_strategy.core.comm import waits
from zerosync_strategy.core.comm.collectives import timeout_of
from zerosync_strategy.core.failures import watch
from zerosync_strategy.core.failures.errors import RankError, is_communication_error
from zerosync_strategy.core.failures.inquiry import Inquiries
from zerosync_strategy.core.failures.rank_state import Phase, RankState, frame_of, observe
from zerosync_strategy.core.failures.watch import HangWatch
from zerosync_strategy.core.failures.words import Report, error_text, report


class RankStatus:
    """What this process is doing, for the others to read in the ``store`` when one of them is in trouble.

    After ``patience`` seconds in which nothing has come on, one of them is; zero: whatever comes.
    """

    def __init__(self, store: Any, rank: int, world_size: int, patience: float = 0) -> None:
        self._rank = rank
        self._activities: list[tuple[object, float]] = []  # the innermost last, each with the time when it began
        self._position = "before its first optimizer step"
        self._progress: Callable[[], Any] = lambda: None
        self._moves = 0  # of the main thread, from activity to activity
        self._stopped: RankState | None = None  # while it is LOST, STOPPED or FAILED: what the others are told
        self._main = threading.main_thread().ident or 0
        self._inquiries: Inquiries | None = None
        with suppress(RuntimeError):  # a store that cannot be shared; errors then speak of this rank alone
            self._inquiries = Inquiries(store, rank, world_size, self._state, self._heard)
        self._watch: HangWatch | None = None
        if self._inquiries is not None and world_size > 1 and patience > 0:
            self._watch = HangWatch(patience, lambda: self._moves, self._waits, self._inquiries.ask)
        atexit.register(self._exit)

    def activity(
        self, what: object, position: Callable[[], str] | None = None, progress: Any = None
    ) -> AbstractContextManager[None]:
        """Around what may communicate; a ``RankError`` in place of an error of the communication.

        Args:
            what: this rank does; its text is asked for when something fails.
            position: returns how far the rank has come; without it, as before.
            progress: says it for the verdict; without it, as before.
        """
        return _Activity(self, what, position, progress)

    def _begin(self, what: object, position: Callable[[], str] | None, progress: Any) -> None:
        if position is not None:
            self._position = position()
        if progress is not None:
            self._progress = weakref.ref(progress)  # an engine is not kept by it
        if self._stopped is not None:
            self._stop(None)
        self._moves += 1
        self._activities.append((what, time.monotonic()))

    def _raised(self, what: object, error: BaseException) -> None:
        """In ``what``; an error of the communication becomes a ``RankError``."""
        if isinstance(error, RankError) or not isinstance(error, Exception):
            return
        if is_communication_error(error):
            message = self.describe(str(what), error)
            self.record_failure(f"lost the other ranks in {what}")
            raise RankError(message) from error
        self.record_failure(f"{type(error).__name__} in {what}", error)

    def _end(self, position: Callable[[], str] | None) -> None:
        self._moves += 1
        self._activities.pop()
        if position is not None:
            self._position = position()

    def record_failure(self, why: str, error: BaseException | None = None, goes_on: bool = True) -> None:
        """Write to the store ``why`` this rank stops, for the ranks that will miss it.

        Without an ``error``, its own or one of the communication, it has lost the others. ``goes_on``: the program may
        catch the error; torch's flight recorder, which takes time, is not asked then.
        """
        if self._stopped is not None and self._stopped.phase is not Phase.LOST:
            return  # the first, from the innermost activity, says most
        waited = error is not None and is_communication_error(error)
        frame = None if error is None else frame_of(error)
        state = self._stopped or self._observe(frame, failed=waited, with_recorder=not goes_on)
        if error is None or waited:
            self._stop(replace(state, phase=Phase.STOPPED, failure=why, seconds=-1))
        else:
            self._stop(replace(state, phase=Phase.FAILED, failure=why, seconds=-1, waits_for=""))

    def _stop(self, state: RankState | None) -> None:
        """Tell the others ``state``, in which this rank has stopped; ``None``: it goes on."""
        self._stopped = state
        if self._inquiries is not None:
            self._inquiries.record_failure(state)

    def describe(self, what: str, error: BaseException) -> str:
        """Return what the ranks are doing after ``error`` of the communication in ``what``. Takes some five seconds."""
        self._stopped = lost = self._observe(frame_of(error), failed=True)
        found = report([lost]) if self._inquiries is None else self._inquiries.ask()
        # A rank that asks when this one has stopped is to hear why: others have stopped since, for want of it.
        self._stopped = replace(lost, verdict=found.verdict, advises=found.advises)
        return error_text(self._rank, what, self._position, error, found)

    def uncaught(self, error: object) -> None:
        """The program ends with ``error``, if that is an exception."""
        if isinstance(error, Exception):
            self.record_failure(f"{type(error).__name__} outside of the engine", error, goes_on=False)

    def _exit(self) -> None:
        self.uncaught(getattr(sys, "last_value", None))
        self.end()

    def end(self) -> None:
        """Answer no more, and let go of the store. A second call does nothing."""
        atexit.unregister(self._exit)
        if self._watch is not None:
            self._watch.end()
        if self._inquiries is not None:
            self._inquiries.end()
        self._inquiries = None

    def _waits(self) -> bool:
        return bool(self._state().with_pending().waits_for)

    def _heard(self, summary: Callable[[], Report]) -> None:
        """Another rank has asked all; what it finds, a rank that waits as long prints, too."""
        if self._watch is not None and self._watch.is_stuck():
            self._watch.tell(summary())

    def _state(self) -> RankState:
        # No variable for the frame: it may be this one, which would then keep itself.
        return self._stopped or self._observe(sys._current_frames().get(self._main))

    def _observe(self, frame: FrameType | None, **how: bool) -> RankState:
        return observe(self._rank, list(self._activities), frame, self._position, self._progress(), **how)


class _Activity(AbstractContextManager[None]):
    """What :meth:`RankStatus.activity` returns; a generator would cost each gather more."""

    def __init__(self, status: RankStatus, what: object, position: Callable[[], str] | None, progress: Any) -> None:
        self._status, self._what, self._position, self._progress = status, what, position, progress

    def __enter__(self) -> None:
        self._status._begin(self._what, self._position, self._progress)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is not None:
                self._status._raised(self._what, error)
        finally:
            self._status._end(self._position)


_current: tuple[Callable[[], Any], RankStatus] | None = None  # with a reference to its group that does not keep it


def rank_status() -> RankStatus:
    """Return the status of this process in its default process group. That of an earlier one ends."""
    global _current
    group = dist.distributed_c10d._get_default_group()
    if _current is None or _current[0]() is not group:
        if _current is not None:
            _current[1].end()
            waits.reset()
        store = dist.distributed_c10d._get_default_store()
        patience = timeout_of(None).total_seconds() / 2
        patience = patience if patience >= watch.LEAST_SECONDS else 0
        _current = weakref.ref(group), RankStatus(store, dist.get_rank(), dist.get_world_size(), patience)
    return _current[1]
