"""Asking all ranks what they are doing, over the process group's store, in as many store operations as ranks.

Inquiries are numbered, and at most one is open. The first rank that asks in inquiry n is its collector. Ranks that ask
while it is open wait for the collector's summary. The keys:

``closed``             the number of the open inquiry, or of the next one.
``asked/n/k``          how many ranks have asked to be the k-th collector, which replaces one that has died.
``call/n/r``           the awaited collectives. Wakes rank r's thread, which appends its state to ``answers/n``.
``failed/r``           the state in which rank r has stopped; empty if it has not.
``host/h``             the ranks of a host with their processes, a line each: the system knows which have ended, also of
                       one whose threads answer nobody.
``waits/n``            the collectives that ranks wait for, and a digest of which rank waits for which.
``summary/n``          the report on all ranks. Written once ``closed`` is n + 1, so its readers open another inquiry.

Two inquiries find that all ranks wait for each other. The first collects what each waits for; in the second, each
answers which of these it has issued. If no rank has moved in between, all answers hold at the same time.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import PrefixStore

from zerosync_strategy.core.engine.types import Store
from zerosync_strategy.core.failures.flight_recorder import Key
from zerosync_strategy.core.failures.rank_state import Phase, RankState
from zerosync_strategy.core.failures.words import Report, report

_ANSWER_SECONDS = 5.0
"""How long a collector waits for answers of processes that may live."""
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
_CONNECT = timedelta(seconds=5)
_AWAITED = 256
"""The most different collectives that ranks are asked about."""


class Inquiries:
    """Asks all ranks, and runs a thread that answers other ranks with the state of this one.

    ``state`` returns it, given the collectives that ranks wait for. After an answer, the thread calls ``heard`` with a
    function that waits for the summary and returns it.

    Raises a ``RuntimeError`` if the ``store`` of the process group cannot be shared.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, state: Callable[[Sequence[Key]], RankState],
        heard: Callable[[Callable[[], Report]], None] = lambda summary: None,
    ) -> None:  # fmt: skip
        self._rank = rank
        self._ranks = range(world_size)
        self._state, self._heard = state, heard
        self._ended = False
        # One connection more than the process group's, because a connection is blocked while a thread waits on it, and
        # a store has room for few.
        self._store: Store = PrefixStore(_PREFIX, store)
        self._connection = store.clone()
        self._connection.set_timeout(_CONNECT)
        listening: Any = PrefixStore(_PREFIX, self._connection)
        listening.set(f"failed/{rank}", "")  # a store that outlives a restart still has earlier failures,
        self._number = _open_number(listening)  # inquiries,
        with suppress(RuntimeError):  # and perhaps a call that was never answered
            listening.delete_key(f"call/{self._number}/{rank}")
        self._host = f"host/{host()}"
        with suppress(RuntimeError):  # a store that cannot append: then errors describe this rank only
            listening.append(self._host, json.dumps([rank, *this_process()]) + "\n")
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
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    # ---- asking ----------------------------------------------------------------------------------------------------

    def ask(self, connect: bool = False) -> Report:
        """Return the report on all ranks. Takes up to five seconds, and longer if a collector dies.

        ``connect``: over a connection of its own, as another thread may be blocked on the process group's. To connect
        takes a millisecond, but seconds now and then.
        """
        states = {rank: RankState(rank, Phase.GONE) for rank in self._ranks} | {self._rank: self._state(())}
        try:
            store = self._connect() if connect else self._store
            number = _open_number(store)
            for attempt in range(_COLLECTORS):
                if store.add(f"asked/{number}/{attempt}", 1) == 1:
                    break
                if states[self._rank].phase is Phase.LOST:  # else its thread answers, which is asked for more
                    self._answer(store, number, ())
                with suppress(RuntimeError):
                    return _summary(store, number)
        except RuntimeError:  # the store ends with the rank that hosts it
            return report(list(states.values()))
        awaited: Sequence[Key] = ()
        before = ""
        with suppress(RuntimeError):  # if the store ends, the answers read so far are used
            awaited, before = _last_waits(store, number)
            states[self._rank] = self._state(awaited)
            calls = [f"call/{number}/{rank}" for rank in self._ranks]
            store.multi_set(calls, [json.dumps(awaited)] * len(calls))
            self._read_answers(store, number, states)
        keys, now = _waits(states)
        found = report(list(states.values()), awaited if now == before else ())
        with suppress(RuntimeError):
            store.set(f"waits/{number}", json.dumps([keys, now]))
            store.compare_set("closed", str(number), str(number + 1))
            store.set(f"summary/{number}", json.dumps(found))
        return found

    def _connect(self) -> Store:
        """Return a connection that ends with its last reference. Raise a ``RuntimeError`` if the store is gone."""
        if not self._thread.is_alive():  # ended by that; to connect would take as long as the timeout
            raise RuntimeError("The store of the process group has ended.")
        return PrefixStore(_PREFIX, self._connection.clone())

    def _read_answers(self, store: Store, number: int, states: dict[int, RankState]) -> None:
        """Collect the answers of the other ranks into ``states``."""
        began, missing = time.monotonic(), set(self._ranks) - {self._rank}
        here = self._processes(store)
        settled = False
        # Ranks that fail together do so within a second. The first look is late enough for a single inquiry to suffice.
        pause = min(max(0.05, len(self._ranks) / 1000), 0.5)
        while missing or not settled:
            time.sleep(pause)
            waited, pause = time.monotonic() - began, min(2 * pause, 1.0)
            ended = _dead(here)
            if store.check([f"answers/{number}"]):
                for line in store.get(f"answers/{number}").decode().splitlines():
                    state = RankState.decode(json.loads(line))
                    ended |= dict(state.ended)
                    if state.rank in missing or state.phase is Phase.LOST:
                        missing.discard(state.rank)
                        states[state.rank] = state
            dead = {rank: RankState(rank, Phase.GONE, pid=pid) for rank, pid in ended.items() if rank in missing}
            states |= dead
            idle = {rank for rank, state in states.items() if state.phase is Phase.RUNNING and not state.waits_for}
            stopped = self._read_failures(store, missing | idle)
            states |= stopped
            missing -= dead.keys()
            settled = waited >= _SETTLE_SECONDS or idle <= stopped.keys()
            if missing and waited >= (_ANSWER_SECONDS if missing - stopped.keys() else _STOPPED_SECONDS):
                return

    def _processes(self, store: Store) -> dict[int, Process]:
        """Return the processes of this host's ranks."""
        lines = store.get(self._host).decode().splitlines()
        return {rank: Process(pid, started) for rank, pid, started in map(json.loads, lines)}

    def _read_failures(self, store: Store, ranks: set[int]) -> dict[int, RankState]:
        """Return the states that stopped ranks among ``ranks`` have written."""
        written = read_keys(store, {rank: f"failed/{rank}" for rank in sorted(ranks)})
        return {rank: RankState.decode(json.loads(text)) for rank, text in written.items() if text}

    # ---- answering -------------------------------------------------------------------------------------------------

    def _listen(self, store: Store) -> None:
        with suppress(RuntimeError):  # the store is gone, and with it the run
            # end() sets ``_ended`` before it reads ``_number``, so one of the two checks sees it.
            while not self._ended:
                call = f"call/{self._number}/{self._rank}"
                store.wait([call], _NEVER)
                if self._ended:
                    return
                self._answer(store, self._number, json.loads(store.get(call)))
                with suppress(RuntimeError):  # the collector has died; another rank may ask, or none
                    self._heard(partial(_summary, store, self._number))
                self._number += 1

    def _answer(self, store: Store, number: int, awaited: Sequence[Key]) -> None:
        ended = tuple(_dead(self._processes(store)).items())
        state = replace(self._state(awaited), ended=ended)
        store.append(f"answers/{number}", json.dumps(state.encode()) + "\n")


def _open_number(store: Store) -> int:
    return int(store.compare_set("closed", "", "0"))  # sets it only if the key does not exist


def _dead(here: dict[int, Process]) -> dict[int, int]:
    """Return the ranks whose processes have ended, each with its process id."""
    return {rank: process.pid for rank, process in here.items() if process.has_ended}


def _waits(states: dict[int, RankState]) -> tuple[list[Key], str]:
    """Return the collectives that ranks wait for, and a digest of which rank waits for which."""
    by_rank = {rank: state.wait.key for rank, state in sorted(states.items()) if state.wait is not None}
    keys = list(dict.fromkeys(by_rank.values()))
    return keys if len(keys) <= _AWAITED else [], hashlib.sha256(repr(by_rank).encode()).hexdigest()


def _last_waits(store: Store, number: int) -> tuple[list[Key], str]:
    """Return what the inquiry before this one has found."""
    if not store.check([f"waits/{number - 1}"]):
        return [], ""
    keys, digest = json.loads(store.get(f"waits/{number - 1}"))
    return list(map(tuple, keys)), digest


def _summary(store: Store, number: int) -> Report:
    """Wait for the report of an inquiry; a ``RuntimeError`` if it is not written in time."""
    store.wait([f"summary/{number}"], timedelta(seconds=_SUMMARY_SECONDS))
    return Report(*json.loads(store.get(f"summary/{number}")))


def read_keys(store: Store, keys: dict[int, str]) -> dict[int, str]:
    """Return the texts of the ``keys`` that exist in the store. A rank that never wrote its key is left out."""
    if keys and not store.check(list(keys.values())):
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    texts = store.multi_get(list(keys.values())) if keys else ()
    return {rank: text.decode() for rank, text in zip(keys, texts, strict=True)}


class Process(NamedTuple):
    """A process of a host. Its start tells it from a later one with the same ``pid``; empty: unknown."""

    pid: int
    started: str

    @property
    def has_ended(self) -> bool:
        """Whether it has ended. Only of a process of this host, in the same namespace."""
        return bool(self.started) and _started(self.pid) != self.started


def this_process() -> Process:
    """Return the process that calls this."""
    return Process(os.getpid(), _started(os.getpid()) if host() else "")


def host() -> str:
    """Return words for the kernel and the namespace of process ids; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return when a process has started, in the system's ticks; empty if it is no more, or ends."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in "ZX" else fields[18]
