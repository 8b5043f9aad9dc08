"""The second level of a gather between nodes, started when the first has arrived. Off NCCL.

What arrives from other nodes is forwarded within the node. Other ranks must not have to wait until this rank waits
itself, because it may be waiting for the same ranks in another exchange. So a thread starts second levels, in the order
in which the exchanges were issued, which is the same on all ranks.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

_Launch = Callable[[], Sequence[Any]]


class RelayedWork:
    """The works of a second level, launched later, as one work."""

    def __init__(self, works: Future[Sequence[Any]]) -> None:
        self._works = works

    def wait(self, timeout: timedelta) -> None:
        """Wait until both levels have arrived. Raise ``RuntimeError`` on a timeout, or if a rank has ended."""
        for work in self._works.result():  # the relay's own waits have the timeout
            work.wait(timeout)

    def is_completed(self) -> bool:
        return self._works.done() and (
            self._works.exception() is not None or all(work.is_completed() for work in self._works.result())
        )


_Exchange = tuple[Sequence[Any], timedelta, _Launch, Future[Sequence[Any]]]


class Relay:
    """Launches second levels, one after the other. Its thread ends with it, or with the process."""

    def __init__(self) -> None:
        self._pending: queue.SimpleQueue[_Exchange | None] = queue.SimpleQueue()
        self._started = False

    def launch_after(self, works: Sequence[Any], timeout: timedelta, launch: _Launch) -> RelayedWork:
        """Call ``launch``, which returns the works of the second level, after the works of the first have arrived."""
        if not self._started:
            self._started = True
            threading.Thread(target=_relay, args=(self._pending,), name="zerosync-relay", daemon=True).start()
            weakref.finalize(self, self._pending.put, None)
        launched: Future[Sequence[Any]] = Future()
        self._pending.put((works, timeout, launch, launched))
        return RelayedWork(launched)


def _relay(pending: queue.SimpleQueue[_Exchange | None]) -> None:
    while (exchange := pending.get()) is not None:
        works, timeout, launch, launched = exchange
        try:
            for work in works:
                work.wait(timeout)
            launched.set_result(launch())
        except BaseException as error:
            launched.set_exception(error)
        del exchange, works, launch, launched  # drop what they keep alive
