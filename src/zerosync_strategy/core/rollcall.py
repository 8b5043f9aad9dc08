"""What every rank was doing when one of them could not go on: an error with a line per rank (W4).

Nothing is sent while all goes well. Each process has a thread that sleeps on a key of the process group's store. A rank
whose communication fails writes everybody's key; the threads wake and write what their own process is doing, and that
goes into the error. A rank that fails for a reason of its own writes the reason down before it raises.
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
"""How long a rank in trouble waits for the answers of the others, if they have not left word."""
_PREFIX = "zerosync/rollcall"
_NEVER = timedelta(days=10_000)
_LIBRARIES = ("/torch/", "/deepspeed/", "/lightning/", "/accelerate/", "/zerosync_strategy/", "/contextlib.py")


class RankError(RuntimeError):
    """Communication with other ranks failed or timed out; the message says what each rank was doing."""


class RollCall:
    """What this process is doing, for the others to know if one of them is in trouble.

    Args:
        store: the store of the process group.
        rank, world_size: of this process.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._doing: list[tuple[str, float]] = []  # innermost last, each with when it began
        self._position = "before its first optimizer step"
        self._failure = ""  # why this rank stopped of its own accord, until it goes on
        self._store: Any = None
        self._ended = False
        self._call = 0  # which roll call comes next; the same on every rank
        self._main = threading.main_thread().ident
        try:
            # Connections of their own: one that waits lets nobody else speak.
            self._store, listening = (PrefixStore(_PREFIX, store.clone()) for _ in range(2))
        except RuntimeError:
            pass  # a store that cannot be shared; errors then speak of this rank alone
        else:
            self._tell(f"failed/{rank}", "")  # a store that outlives a restart has what was said before
            self._thread = threading.Thread(
                target=self._listen, args=(listening,), name="zerosync-rollcall", daemon=True
            )
            self._thread.start()
            atexit.register(self._end)

    @contextmanager
    def doing(self, what: str, position: Callable[[], str] | None = None) -> Iterator[None]:
        """Around what may communicate: ``what`` this rank does, and ``position``, how far it has come, if that changes.

        Raises:
            RankError: in place of an error of the communication.
        """
        position = position or (lambda: self._position)
        self._position = position()
        if self._failure:
            self._failure = ""
            self._tell(f"failed/{self._rank}", "")
        self._doing.append((what, time.monotonic()))
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            if not of_communication(error):
                self.failed(f"{type(error).__name__} in {what}, {self._position}")
                raise
            message = self.describe(what, error)
            self.failed(f"lost the other ranks in {what}, {self._position}")
            raise RankError(message) from error
        finally:
            self._doing.pop()
            self._position = position()

    def failed(self, why: str) -> None:
        """Leave word that this rank stops for a reason of its own. Others read it when they miss this rank."""
        if not self._failure:  # what was said first, from innermost, says most
            self._failure = f"has stopped: {why}"
            self._tell(f"failed/{self._rank}", self._failure)

    def _tell(self, key: str, text: str) -> None:
        if self._store is not None:
            with suppress(RuntimeError):  # the store may be gone
                self._store.set(key, text)

    def describe(self, what: str, error: BaseException) -> str:
        """What each rank is doing, after ``error`` of the communication in ``what``. Takes up to five seconds."""
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
        """What each rank says that it is doing."""
        answers = {self._rank: self._status()}
        missing = set(range(self._world_size)) - answers.keys()
        if self._store is None:
            return answers
        call, asked = self._call, time.monotonic()
        left_word: set[int] = set()
        answers |= dict.fromkeys(missing, "gave no answer: its process has ended, or cannot be reached")
        with suppress(RuntimeError):  # the store ends with the rank that has it
            for rank in range(self._world_size):
                self._store.set(f"call/{call}/{rank}", "")
            while missing and time.monotonic() < asked + (ANSWER_SECONDS if missing - left_word else 1):
                for rank in tuple(missing):
                    if answer := self._look(f"answer/{call}/{rank}"):
                        missing.remove(rank)
                    elif answer := self._look(f"failed/{rank}"):
                        left_word.add(rank)
                    answers[rank] = answer or answers[rank]
                time.sleep(0.05)
        return answers

    def _look(self, key: str) -> str:
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
        self._tell(f"call/{self._call}/{self._rank}", "")
        self._thread.join(timeout=1.0)

    def _status(self) -> str:
        if self._doing:
            what, began = self._doing[-1]
            doing = f"in {what} for {time.monotonic() - began:.0f} s"
        else:
            doing = self._failure or "outside of the engine"
        place = _place(sys._current_frames().get(self._main or 0))
        return f"{doing}, {self._position}{place} (pid {os.getpid()})"


_current: tuple[Any, RollCall] | None = None


def roll_call() -> RollCall:
    """That of this process and its default process group."""
    global _current
    group = dist.group.WORLD
    if _current is None or _current[0] is not group:
        store = dist.distributed_c10d._get_default_store()
        _current = group, RollCall(store, dist.get_rank(), dist.get_world_size())
    return _current[1]


def of_communication(error: BaseException) -> bool:
    """Whether ``error`` was raised because other ranks did not take part."""
    # gloo raises plain RuntimeErrors, which name one of its source files, but for a connection that it has given up.
    of_gloo = isinstance(error, RuntimeError) and ("gloo" in str(error) or "caused pair closure" in str(error))
    return of_gloo or isinstance(error, dist.DistError)


def _first_sentence(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[\S*\] ", "", line).partition(". ")[0].rstrip(".")  # without the place in gloo's source


def _place(frame: FrameType | None) -> str:
    """Where the user's own code is."""
    while frame is not None:
        path = frame.f_code.co_filename
        if not any(library in path for library in _LIBRARIES):
            return f", at {path.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
