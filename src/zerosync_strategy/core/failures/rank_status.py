"""An error with a line per rank that says what each was doing when communication failed (W4).

Nothing is sent while communication works. Each process has a thread that sleeps on a key of the process group's store.
A rank whose communication fails writes all keys. The threads wake and write what their own process is doing, and the
error has these lines. A rank that raises another error writes it to the store first.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

ANSWER_SECONDS = 5.0
"""How long a rank in trouble waits for the answers of the others, unless they have recorded a failure."""
_PREFIX = "zerosync/rank_status"
_NEVER = timedelta(days=10_000)
_LIBRARIES = ("/torch/", "/deepspeed/", "/lightning/", "/accelerate/", "/zerosync_strategy/", "/contextlib.py")


class RankError(RuntimeError):
    """Communication with other ranks failed or timed out; the message says what each rank was doing."""


class RankStatus:
    """What this process is doing, for the others to read when one of them is in trouble.

    Args:
        store: the store of the process group.
        rank, world_size: of this process.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._activities: list[tuple[str, float]] = []  # the innermost last, each with the time when it began
        self._position = "before its first optimizer step"
        self._failure = ""  # why this rank has stopped, until it goes on
        self._store: Any = None
        self._ended = False
        self._call = 0  # the number of the next inquiry; the same on every rank
        self._main = threading.main_thread().ident
        try:
            # One connection each: while one waits, nobody else can use it.
            self._store, listening = (PrefixStore(_PREFIX, store.clone()) for _ in range(2))
        except RuntimeError:
            pass  # a store that cannot be shared; errors then speak of this rank alone
        else:
            self._write(f"failed/{rank}", "")  # a store that outlives a restart has the earlier failures
            self._thread = threading.Thread(
                target=self._listen, args=(listening,), name="zerosync-rank-status", daemon=True
            )
            self._thread.start()
            atexit.register(self._end)

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
            self._write(f"failed/{self._rank}", "")
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
            self._write(f"failed/{self._rank}", self._failure)

    def _write(self, key: str, text: str) -> None:
        if self._store is not None:
            with suppress(RuntimeError):  # the store may be gone
                self._store.set(key, text)

    def describe(self, what: str, error: BaseException) -> str:
        """Return what each rank is doing after ``error`` of the communication in ``what``. Takes up to five seconds."""
        lines = [f"  rank {rank}: {text}" for rank, text in sorted(self._ask().items())]
        return "\n".join([
            f"Rank {self._rank} lost the other ranks in {what}, {self._position}: {_first_sentence(error)}.",
            *lines,
            "Either a rank has ended, for the reason that it printed, or the ranks disagree: each must make the same"
            " optimizer steps, and under ZeRO-3 run the same modules in the same order. A rank that is only slow needs"
            " a longer timeout of the process group.",
        ])  # fmt: skip

    # ---- asking ----------------------------------------------------------------------------------------------------

    def _ask(self) -> dict[int, str]:
        """Return what each rank says that it is doing."""
        answers = {self._rank: self._status()}
        missing = set(range(self._world_size)) - answers.keys()
        if self._store is None:
            return answers
        call, asked = self._call, time.monotonic()
        stopped: set[int] = set()
        answers |= dict.fromkeys(missing, "gave no answer: its process has ended, or cannot be reached")
        with suppress(RuntimeError):  # the store ends with the rank that has it
            for rank in range(self._world_size):
                self._store.set(f"call/{call}/{rank}", "")
            while missing and time.monotonic() < asked + (ANSWER_SECONDS if missing - stopped else 1):
                for rank in tuple(missing):
                    if answer := self._read(f"answer/{call}/{rank}"):
                        missing.remove(rank)
                    elif answer := self._read(f"failed/{rank}"):
                        stopped.add(rank)
                    answers[rank] = answer or answers[rank]
                time.sleep(0.05)
        return answers

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    # ---- answering -------------------------------------------------------------------------------------------------

    def _listen(self, store: Any) -> None:
        with suppress(RuntimeError):  # the store is gone, and with it the run
            while True:
                store.wait([f"call/{self._call}/{self._rank}"], _NEVER)
                if self._ended:
                    return
                store.set(f"answer/{self._call}/{self._rank}", self._status())
                self._call += 1

    def _end(self) -> None:
        # A thread that comes back from the store while Python ends would abort the process.
        self._ended = True
        self._write(f"call/{self._call}/{self._rank}", "")
        self._thread.join(timeout=1.0)

    def _status(self) -> str:
        if self._activities:
            what, began = self._activities[-1]
            activity = f"in {what} for {time.monotonic() - began:.0f} s"
        else:
            activity = self._failure or "outside of the engine"
        place = _place(sys._current_frames().get(self._main or 0))
        return f"{activity}, {self._position}{place} (pid {os.getpid()})"


_current: tuple[Any, RankStatus] | None = None


def rank_status() -> RankStatus:
    """Return the status of this process in its default process group."""
    global _current
    group = dist.group.WORLD
    if _current is None or _current[0] is not group:
        store = dist.distributed_c10d._get_default_store()
        _current = group, RankStatus(store, dist.get_rank(), dist.get_world_size())
    return _current[1]


def is_communication_error(error: BaseException) -> bool:
    """Return whether ``error`` was raised because other ranks did not take part."""
    # gloo raises plain RuntimeErrors, which name one of its source files, but for a connection that it has given up.
    of_gloo = isinstance(error, RuntimeError) and ("gloo" in str(error) or "caused pair closure" in str(error))
    return of_gloo or isinstance(error, dist.DistError)


def _first_sentence(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[\S*\] ", "", line).partition(". ")[0].rstrip(".")  # without the place in gloo's source


def _place(frame: FrameType | None) -> str:
    """Return where the user's own code is."""
    while frame is not None:
        path = frame.f_code.co_filename
        if not any(library in path for library in _LIBRARIES):
            return f", at {path.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
