"""An error with lines that say what each rank was doing when communication failed (W4).

Nothing is sent while communication works. Each process has a thread that sleeps on a key of the process group's store.
A rank whose communication fails wakes all of them, and they write what their own process is doing (``inquiry``). A rank
that raises another error writes it to the store first.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch.distributed as dist

from zerosync_strategy.core.comm import waits
from zerosync_strategy.core.comm.collectives import backend_for
from zerosync_strategy.core.failures.answers import Answer, lines_of
from zerosync_strategy.core.failures.deadlock import DeadlockWatch
from zerosync_strategy.core.failures.inquiry import Inquiries

_LIBRARIES = ("/torch/", "/deepspeed/", "/lightning/", "/accelerate/", "/zerosync_strategy/", "/contextlib.py")

# gloo raises plain RuntimeErrors. They begin with a place in its source, but for a connection that it has given up.
_OF_GLOO = re.compile(
    r"\[(?:enforce fail at )?\S*\bgloo/\S+\.(?:cc|h):\d+\]"
    r"|Application timeout caused pair closure|Connection closed by peer \["
    r"|Gloo connectFullMesh failed with|failed to pass monitoredBarrier in"
)


class RankError(RuntimeError):
    """Communication with other ranks failed or timed out; the message says what each rank was doing."""


class RankStatus:
    """What this process is doing, for the others to read when one of them is in trouble.

    Args:
        store: the store of the process group.
        rank, world_size: of this process.
        watch: look for deadlocks, in a thread. For gloo: NCCL's calls return before they are complete.
    """

    def __init__(self, store: Any, rank: int, world_size: int, watch: bool = False) -> None:
        self._rank = rank
        self._activities: list[tuple[str, float]] = []  # the innermost last, each with the time when it began
        self._position = "before its first optimizer step"
        self._failure = ""  # why this rank has stopped, until it goes on
        self._main = threading.main_thread().ident
        self._deadlock: list[str] = []  # what all ranks were doing when it was certain that this one waits in vain
        self._inquiries: Inquiries | None = None
        self._watch: DeadlockWatch | None = None
        with suppress(RuntimeError):  # a store that cannot be shared; errors then speak of this rank alone
            self._inquiries = Inquiries(store, rank, world_size, self._status)
            if watch:
                self._watch = DeadlockWatch(store, rank, world_size, self._inquiries.ask, self._found_deadlock)

    @contextmanager
    def activity(self, what: str, position: Callable[[], str] | None = None) -> Iterator[None]:
        """Around what may communicate.

        Args:
            what: this rank does.
            position: returns how far the rank has come; without it, as before.

        Raises:
            RankError: in place of an error of the communication.
        """
        position = position or (lambda: self._position)
        self._position = position()
        if self._failure:
            self._failure = ""
            self._note_failure()
        self._activities.append((what, time.monotonic()))
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            if not is_communication_error(error):
                self.record_failure(f"{type(error).__name__} in {what}, {self._position}")
                raise
            message = self.describe(what, error)
            self.record_failure(f"lost the other ranks in {what}, {self._position}")
            raise RankError(message) from error
        finally:
            self._activities.pop()
            self._position = position()

    def record_failure(self, why: str) -> None:
        """Write to the store that this rank stops for a reason of its own, for the ranks that will miss it."""
        if not self._failure:  # the first, from the innermost activity, says most
            self._failure = f"has stopped: {why}"
            self._note_failure()

    def _note_failure(self) -> None:
        if self._inquiries is not None:
            with suppress(RuntimeError):  # the store may be gone
                self._inquiries.note_failure(self._failure)

    def describe(self, what: str, error: BaseException) -> str:
        """Return what the ranks are doing after ``error`` of the communication in ``what``. Takes some five seconds."""
        if self._watch is not None:
            self._watch.settle()
        if self._deadlock:
            return self._describe_deadlock(what)
        lines = lines_of([self._status()]) if self._inquiries is None else self._inquiries.ask()
        return "\n".join([
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
        return "\n".join([
            f"Rank {self._rank} would wait for ever in {what}, {self._position}: ranks are in different collective"
            " calls, each of which needs a rank that waits in another.",
            *self._deadlock,
            "Make the same calls on every rank: save and load checkpoints, gather parameters or a state_dict and, under"
            " ZeRO-3, run forwards on all ranks, not on one (`if rank == 0:`), and let one of them write or log the"
            " result. If ranks are to run different modules of a ZeRO-3 model, use param_memory_budget='all'.",
        ])  # fmt: skip

    def end(self) -> None:
        """Answer no more, and let go of the store."""
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        if self._inquiries is not None:
            self._inquiries.end()
            self._inquiries = None

    def _status(self) -> Answer:
        if self._activities:
            what, began = self._activities[-1]
            activity, seconds = f"in {what}", f" for {time.monotonic() - began:.0f} s"
        else:
            activity, seconds = self._failure or "outside of the engine", ""
        call, place = _place(sys._current_frames().get(self._main or 0))
        activity += call
        position = f", {self._position}"
        return Answer(self._rank, activity, seconds, position, place, os.getpid(), socket.gethostname())


_current: tuple[Callable[[], Any], RankStatus] | None = None  # with a reference to its group that does not keep it


def rank_status() -> RankStatus:
    """Return the status of this process in its default process group. That of an earlier one ends."""
    global _current
    group = dist.distributed_c10d._get_default_group()
    if _current is None or _current[0]() is not group:
        if _current is not None:
            _current[1].end()
            waits.forget()
        store = dist.distributed_c10d._get_default_store()
        world_size = dist.get_world_size()
        watch = world_size > 1 and backend_for(None, "cpu") == "gloo"
        _current = weakref.ref(group), RankStatus(store, dist.get_rank(), world_size, watch)
    return _current[1]


def is_communication_error(error: BaseException) -> bool:
    """Return whether ``error`` was raised because other ranks did not take part."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(_OF_GLOO.search(str(error))))


def _first_sentence(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[\S*\] ", "", line).partition(". ")[0].rstrip(".")  # without the place in gloo's source


def _place(frame: FrameType | None) -> tuple[str, str]:
    """Return the words for the collective of torch that runs, if one does, and for where the user's own code is."""
    call = waits.torch_collective(frame)
    words = f", calling torch.distributed.{call}()" if call else ""
    while frame is not None:
        path = frame.f_code.co_filename
        if not any(library in path for library in _LIBRARIES):
            return words, f", at {path.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return words, ""
