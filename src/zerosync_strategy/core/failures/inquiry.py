"""Asking all ranks what they are doing, over the process group's store, in as many store operations as ranks.

Inquiries are numbered, and at most one is open. The first rank to ask in inquiry n is its collector. Ranks that ask
while it is open wait for the collector's summary. The keys:

``closed``             the number of the open inquiry, or of the next one.
``asked/n/k``          how many ranks have asked to be the k-th collector, which replaces one that has died.
``call/n/r``           wakes rank r's thread, which appends its state to ``answers/n``.
``failed/r``           the state in which rank r has stopped; empty if it has not.
``summary/n``          the report on all ranks. Written once ``closed`` is n + 1, so its readers open another inquiry.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from zerosync_strategy.core.failures.rank_state import Phase, RankState
from zerosync_strategy.core.failures.words import Report, report

ANSWER_SECONDS = 5.0
"""How long a collector waits for answers."""
_STOPPED_SECONDS = 1.0
"""How long it waits if all missing ranks have recorded a failure."""
_SETTLE_SECONDS = 0.5
"""How long it waits for a second answer, or a failure, of ranks that answered while not waiting: their waits, or
collectives that the program has called itself, may have failed just now."""
_SUMMARY_SECONDS = 8.0
"""How long other ranks wait for the collector's summary; more than it needs."""
_COLLECTORS = 2
_PREFIX = "zerosync/rank_status"
_NEVER = timedelta(days=10_000)


class Inquiries:
    """Asks all ranks, and runs a thread that answers other ranks with the ``state`` of this one.

    After an answer, the thread calls ``heard`` with a function that waits for the summary and returns it.

    Raises a ``RuntimeError`` if the ``store`` of the process group cannot be shared.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, state: Callable[[], RankState],
        heard: Callable[[Callable[[], Report]], None] = lambda summary: None,
    ) -> None:  # fmt: skip
        self._rank = rank
        self._ranks = range(world_size)
        self._state, self._heard = state, heard
        self._ended = False
        # Two connections, because a connection is blocked while a thread waits on it.
        self._store: Any = PrefixStore(_PREFIX, store.clone())
        listening: Any = PrefixStore(_PREFIX, store.clone())
        self.record_failure(None)  # a store that outlives a restart still has earlier failures,
        self._number = self._open_number()  # inquiries,
        with suppress(RuntimeError):  # and perhaps a call that was never answered
            self._store.delete_key(f"call/{self._number}/{rank}")
        self._thread = threading.Thread(
            target=self._listen, args=(listening,), name="zerosync-rank-status", daemon=True
        )
        self._thread.start()

    def record_failure(self, stopped: RankState | None) -> None:
        """Write the state in which this rank has stopped, for ranks that will wait for it; ``None``: it continues."""
        with suppress(RuntimeError):  # the store may be gone
            self._store.set(f"failed/{self._rank}", "" if stopped is None else json.dumps(stopped.encode()))

    def end(self) -> None:
        """End the thread and its connection.

        A thread that returns from the store while Python ends would abort the process.
        """
        self._ended = True
        with suppress(RuntimeError):  # the store may be gone, and the thread with it
            self._store.set(f"call/{self._number}/{self._rank}", "")
        self._thread.join(timeout=1.0)

    def _open_number(self) -> int:
        return int(self._store.compare_set("closed", "", "0"))  # sets it only if the key does not exist

    # ---- asking ----------------------------------------------------------------------------------------------------

    def ask(self) -> Report:
        """Return the report on all ranks. Takes up to five seconds, and longer if a collector dies."""
        states = {rank: RankState(rank, Phase.GONE) for rank in self._ranks} | {self._rank: self._state()}
        try:
            number = self._open_number()
            for attempt in range(_COLLECTORS):
                if self._store.add(f"asked/{number}/{attempt}", 1) == 1:
                    break
                self._answer(self._store, number)
                with suppress(RuntimeError):
                    return _summary(self._store, number)
        except RuntimeError:  # the store ends with the rank that hosts it
            return report(list(states.values()))
        with suppress(RuntimeError):  # if the store ends, the answers read so far are used
            self._store.multi_set([f"call/{number}/{rank}" for rank in self._ranks], [""] * len(self._ranks))
            self._read_answers(number, states)
        found = report(list(states.values()))
        with suppress(RuntimeError):
            self._store.compare_set("closed", str(number), str(number + 1))
            self._store.set(f"summary/{number}", json.dumps(found))
        return found

    def _read_answers(self, number: int, states: dict[int, RankState]) -> None:
        """Collect the answers of the other ranks into ``states``."""
        began, missing = time.monotonic(), set(self._ranks) - {self._rank}
        settled = False
        # Ranks that fail together do so within a second. The first look is late enough for a single inquiry to suffice.
        pause = min(max(0.05, len(self._ranks) / 1000), 0.5)
        while missing or not settled:
            time.sleep(pause)
            waited, pause = time.monotonic() - began, min(2 * pause, 1.0)
            if self._store.check([f"answers/{number}"]):
                for line in self._store.get(f"answers/{number}").decode().splitlines():
                    state = RankState.decode(json.loads(line))
                    if state.rank in missing or state.phase is Phase.LOST:
                        missing.discard(state.rank)
                        states[state.rank] = state
            idle = {rank for rank, state in states.items() if state.phase is Phase.RUNNING and not state.waits_for}
            stopped = self._read_failures(missing | idle)
            states |= stopped
            settled = waited >= _SETTLE_SECONDS or idle <= stopped.keys()
            if missing and waited >= (ANSWER_SECONDS if missing - stopped.keys() else _STOPPED_SECONDS):
                return

    def _read_failures(self, ranks: set[int]) -> dict[int, RankState]:
        """Return the states that stopped ranks among ``ranks`` have written."""
        written = read_keys(self._store, {rank: f"failed/{rank}" for rank in sorted(ranks)})
        return {rank: RankState.decode(json.loads(text)) for rank, text in written.items() if text}

    # ---- answering -------------------------------------------------------------------------------------------------

    def _listen(self, store: Any) -> None:
        with suppress(RuntimeError):  # the store is gone, and with it the run
            # end() sets ``_ended`` before it reads ``_number``, so one of the two checks sees it.
            while not self._ended:
                store.wait([f"call/{self._number}/{self._rank}"], _NEVER)
                if self._ended:
                    return
                self._answer(store, self._number)
                with suppress(RuntimeError):  # the collector has died; another rank may ask, or none
                    self._heard(partial(_summary, store, self._number))
                self._number += 1

    def _answer(self, store: Any, number: int) -> None:
        store.append(f"answers/{number}", json.dumps(self._state().encode()) + "\n")


def _summary(store: Any, number: int) -> Report:
    """Wait for the report of an inquiry; a ``RuntimeError`` if it is not written in time."""
    store.wait([f"summary/{number}"], timedelta(seconds=_SUMMARY_SECONDS))
    return Report(*json.loads(store.get(f"summary/{number}")))


def read_keys(store: Any, keys: dict[int, str]) -> dict[int, str]:
    """Return the texts of the ``keys`` that exist in the store. A rank that never wrote its key is left out."""
    if keys and not store.check(list(keys.values())):
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    texts = store.multi_get(list(keys.values())) if keys else ()
    return {rank: text.decode() for rank, text in zip(keys, texts, strict=True)}
