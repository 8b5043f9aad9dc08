"""An error with lines that say what each rank was doing when communication failed (W4).

Nothing is sent while communication works. Each process has a thread that sleeps on a key of the process group's store.
A rank whose communication fails wakes all of them, and they write what their own process is doing (``inquiry``). A rank
that raises another error writes it to the store first.
"""

from __future__ import annotations

import atexit
import re
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any

import torch.distributed as dist

from zerosync_strategy.core.comm import waits
from zerosync_strategy.core.comm.collectives import backend_for
from zerosync_strategy.core.failures.deadlock import DeadlockWatch
from zerosync_strategy.core.failures.errors import RankError, is_communication_error
from zerosync_strategy.core.failures.inquiry import Inquiries
from zerosync_strategy.core.failures.rank_state import Phase, Progress, RankState, frame_of, observe
from zerosync_strategy.core.failures.verdict import OTHER_BACKWARDS, VERDICT, report


class RankStatus:
    """What this process is doing, for the others to read when one of them is in trouble.

    Args:
        store: the store of the process group.
        rank, world_size: of this process.
        watch: look for deadlocks, in a thread. For gloo: NCCL's calls return before they are complete.
    """

    def __init__(self, store: Any, rank: int, world_size: int, watch: bool = False) -> None:
        self._rank = rank
        self._activities: list[tuple[object, float]] = []  # the innermost last, each with the time when it began
        self._position = "before its first optimizer step"
        self._progress: Callable[[], Progress | None] = lambda: None
        self._stopped: RankState | None = None  # while it is LOST, STOPPED or FAILED: what the others are told
        self._main = threading.main_thread().ident or 0
        self._deadlock: list[str] = []  # what all ranks were doing when it was certain that this one waits in vain
        self._inquiries: Inquiries | None = None
        self._watch: DeadlockWatch | None = None
        with suppress(RuntimeError):  # a store that cannot be shared; errors then speak of this rank alone
            self._inquiries = Inquiries(store, rank, world_size, self._state)
            if watch:
                self._watch = DeadlockWatch(store, rank, world_size, self._inquiries.ask, self._found_deadlock)
        atexit.register(self._exit)

    @contextmanager
    def activity(
        self, what: object, position: Callable[[], str] | None = None, progress: Progress | None = None
    ) -> Iterator[None]:
        """Around what may communicate.

        Args:
            what: this rank does; its text is asked for when something fails.
            position: returns how far the rank has come; without it, as before.
            progress: says it for the verdict; without it, as before.

        Raises:
            RankError: in place of an error of the communication.
        """
        position = position or (lambda: self._position)
        self._position = position()
        if progress is not None:
            self._progress = weakref.ref(progress)  # an engine is not kept by it
        if self._stopped is not None:
            self._stop(None)
        self._activities.append((what, time.monotonic()))
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            if not is_communication_error(error):
                self.record_failure(f"{type(error).__name__} in {what}", error)
                raise
            message = self.describe(str(what), error)
            self.record_failure(f"lost the other ranks in {what}")
            raise RankError(message) from error
        finally:
            self._activities.pop()
            self._position = position()

    def record_failure(self, why: str, error: BaseException | None = None) -> None:
        """Write to the store that this rank stops for a reason of its own, for the ranks that will miss it.

        Args:
            why: in words.
            error: its own. Without one, it has lost the others.
        """
        if self._stopped is not None and self._stopped.phase is not Phase.LOST:
            return  # the first, from the innermost activity, says most
        # Torch's flight recorder is not asked: the program may catch the error and go on.
        state = self._stopped or self._observe(None if error is None else frame_of(error), with_recorder=False)
        if error is None:
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
        if self._watch is not None:
            self._watch.settle()
        lines = self._deadlock or (report([lost]) if self._inquiries is None else self._inquiries.ask())
        # A rank that asks when this one has stopped is to hear why: others have stopped since, for want of it.
        verdict = next((line.removeprefix(VERDICT) for line in lines if line.startswith(VERDICT)), "")
        self._stopped = replace(lost, verdict=verdict)
        if self._deadlock:
            return self._describe_deadlock(what)
        return _with_advice([
            f"Rank {self._rank} lost the other ranks in {what}, {self._position}: {_first_sentence(error)}.",
            *lines,
            "Either a rank has ended, for the reason that it printed, or the ranks disagree: each must make the same"
            " optimizer steps, and under ZeRO-3 run the same modules in the same order, unless all parameters are held"
            " (param_memory_budget='all'). A rank that is only slow needs a longer timeout of the process group.",
        ])  # fmt: skip

    def _found_deadlock(self, lines: list[str]) -> None:
        self._deadlock = lines
        if not self._activities:  # nobody else will say it
            warnings.warn(self._describe_deadlock("a call outside of the engine"), stacklevel=2)

    def _describe_deadlock(self, what: str) -> str:
        return _with_advice([
            f"Rank {self._rank} would wait for ever in {what}, {self._position}: ranks are in different collective"
            " calls, each of which needs a rank that waits in another.",
            *self._deadlock,
            "Make the same calls on every rank: save and load checkpoints, gather parameters or a state_dict and, under"
            " ZeRO-3, run forwards on all ranks, not on one (`if rank == 0:`), and let one of them write or log the"
            " result. If ranks are to run different modules of a ZeRO-3 model, use param_memory_budget='all'.",
        ])  # fmt: skip

    def _exit(self) -> None:
        # An exception that nobody has caught, outside of the engine.
        error = getattr(sys, "last_value", None)
        if isinstance(error, Exception) and not is_communication_error(error):
            self.record_failure(f"{type(error).__name__} outside of the engine", error)
        self.end()

    def end(self) -> None:
        """Answer no more, and let go of the store. A second call does nothing."""
        atexit.unregister(self._exit)
        if self._watch is not None:
            self._watch.end()
        if self._inquiries is not None:
            self._inquiries.end()
        self._watch = self._inquiries = None

    def _state(self) -> RankState:
        # No variable for the frame: it may be this one, which would then keep itself.
        return self._stopped or self._observe(sys._current_frames().get(self._main))

    def _observe(self, frame: FrameType | None, **how: bool) -> RankState:
        return observe(self._rank, list(self._activities), frame, self._position, self._progress(), **how)


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
        world_size = dist.get_world_size()
        watch = world_size > 1 and backend_for(None, "cpu") == "gloo"
        _current = weakref.ref(group), RankStatus(store, dist.get_rank(), world_size, watch)
    return _current[1]


def _with_advice(lines: list[str]) -> str:
    """Return the lines of an error, whose last is the advice, unless the verdict has its own."""
    return "\n".join(lines[:-1] if any(OTHER_BACKWARDS in line for line in lines) else lines)


def _first_sentence(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[\S*\] ", "", line).partition(". ")[0].rstrip(".")  # without the place in gloo's source
