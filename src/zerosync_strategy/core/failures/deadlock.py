"""Ranks that wait for one another in different collective calls, found long before the timeout of the process group.

A thread looks twice a second, in this process alone, in which call the main thread waits (``comm/waits.py``). A rank
that has waited in one for two seconds writes to the store in which, and which calls it has issued. The first ranks of
each call's group read what all have written, and look for a set of ranks each of which waits for another of the set:
one that has not issued the call, and cannot, because it waits too. Then none of them will ever get on. It does not
matter that ranks write at different times: the first of the set to get on would need another that has got on before.
Before the error, each of the set confirms that it waits as it has written: a store that outlives a restart has what
ranks wrote in an earlier life. A rank that is slow, computes or writes a file does not wait, so no call that needs it
is ever taken for lost.

Nothing is sent before a rank has waited for two seconds. The keys, of which the store keeps the last:

``waits/r``        what rank r waits for, when it last wrote.
``issued/r``       the exchanges that it had issued then; read where ranks wait in different calls.
``suspicion``      the name of the last set that was found.
``suspects/name``  what its ranks have written.
``confirmed/name`` how many have.
``deadlock/name``  the lines of the error, and ``told/name`` how many have read them.
"""

from __future__ import annotations

import json
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from zerosync_strategy.core.comm import waits
from zerosync_strategy.core.comm.collectives import is_alike
from zerosync_strategy.core.comm.waits import Call, Wait
from zerosync_strategy.core.failures.inquiry import read_keys

PATIENCE_SECONDS = 2.0
"""How long a rank waits in a call before it says so."""
_POLL_SECONDS = 0.5
_LONGEST_PAUSE = 30.0
_CONFIRM_SECONDS = 3.0
_PREFIX = "zerosync/deadlock"


@dataclass(frozen=True)
class Waiting:
    """What one rank waits for.

    Attributes:
        call: that it has issued, and that is not complete.
        ranks: of the call's process group; empty for all.
        collectives: of torch that the rank has issued, by group.
        exchanges: that it has issued, by group and tag; in a key of their own, read where they matter.
    """

    call: Call
    ranks: tuple[int, ...]
    collectives: Mapping[str, int]
    exchanges: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    def lacks(self, call: Call) -> bool:
        """Whether the rank has not issued ``call``, or another one in its place."""
        if not call.name:
            return self.exchanges.get(call.group, {}).get(call.tag, 0) < call.number
        if call.group not in self.collectives:
            return False  # its number is not known there
        if self.call.name and (self.call.group, self.call.number) == (call.group, call.number):
            return self.call.name != call.name
        return self.collectives[call.group] < call.number

    def encode(self) -> str:
        """Return all but the exchanges, as a text."""
        return json.dumps({"call": asdict(self.call), "ranks": self.ranks, "collectives": self.collectives})

    @staticmethod
    def decode(text: str, exchanges: str = "{}") -> Waiting:
        """Return what ``text`` was encoded from, with ``exchanges`` from theirs."""
        fields = json.loads(text)
        issued = {
            group: {int(tag): number for tag, number in tags.items()} for group, tags in json.loads(exchanges).items()
        }
        return Waiting(Call(**fields["call"]), tuple(fields["ranks"]), fields["collectives"], issued)


def compare_numbers(process_groups: Iterable[Any]) -> None:
    """Watch those of ``process_groups`` over which all ranks have issued as many collectives. Collective."""
    waits.count_point_to_point()
    for group in process_groups:
        if waits.is_numbered(group) and is_alike([waits.collectives_over(group)], group):
            waits.number_alike(group)


def deadlocked(waiting: Mapping[int, Waiting]) -> set[int]:
    """Return the ranks of ``waiting`` that will wait for ever; empty unless that is certain."""
    calls: dict[Call, set[int]] = {}
    for rank, state in waiting.items():
        calls.setdefault(state.call, set()).add(rank)
    missing = {
        call: {rank for rank in waiting[min(ranks)].ranks or waiting if rank in waiting and waiting[rank].lacks(call)}
        for call, ranks in calls.items()
    }
    found = set(waiting)
    while True:
        may_end = {call for call in calls if not missing[call] & found}
        if not may_end:
            return found
        for call in may_end:
            found -= calls.pop(call)


class DeadlockWatch:
    """Watches the main thread of this process.

    Args:
        store: the store of the process group.
        rank, world_size: of this process.
        describe: returns the lines that say what all ranks are doing.
        found: is called once, from the thread, with these lines, before the waiting main thread gets an error.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int,
        describe: Callable[[], list[str]], found: Callable[[list[str]], None],
    ) -> None:  # fmt: skip
        self._shared = store
        self._store: Any = None  # a connection of its own, once it is needed
        self._rank, self._world_size = rank, world_size
        self._describe, self._found = describe, found
        self._main = threading.main_thread().ident or 0
        self._expected_until = 0.0  # the error of a set that this rank is in
        self._told = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zerosync-deadlock-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(timeout=2.0)

    def settle(self) -> None:
        """Wait for the error that this rank has confirmed: one that was told first closes the others' connections."""
        self._told.wait(max(0.0, self._expected_until - time.monotonic()))

    def _expect_error(self) -> None:
        self._expected_until = time.monotonic() + 2 * _CONFIRM_SECONDS

    def _watch(self) -> None:
        before, since = None, 0.0
        while not self._ended.wait(_POLL_SECONDS):
            with suppress(RuntimeError):  # a process group or the store may be gone
                wait = self._current_wait()
                if wait is None or wait.call != before:
                    before, since = wait and wait.call, time.monotonic()
                elif time.monotonic() - since >= PATIENCE_SECONDS and (lines := self._look(wait)):
                    self._found(lines)
                    self._told.set()
                    waits.give_up(wait.process_group)
                    return

    def _current_wait(self) -> Wait | None:
        return waits.current_wait(self._main, sys._current_frames().get(self._main))

    def _look(self, wait: Wait) -> list[str]:
        """While the main thread stays in ``wait``: return the lines of the error once it is certain, else nothing."""
        if self._store is None:
            self._store = PrefixStore(_PREFIX, self._shared.clone())
        ranks = dist.get_process_group_ranks(wait.process_group)
        everyone = len(ranks) == self._world_size
        own = Waiting(wait.call, () if everyone else tuple(ranks), waits.collectives()).encode()
        self._store.multi_set([f"issued/{self._rank}", f"waits/{self._rank}"], [json.dumps(waits.exchanges()), own])
        began, pause = time.monotonic(), _POLL_SECONDS
        next_read = began + pause * max(0, ranks.index(self._rank) - 1)
        heard = confirmed = ""
        while not self._ended.wait(_POLL_SECONDS):
            now = self._current_wait()
            if (now is None or now.call != wait.call) and time.monotonic() > self._expected_until:
                break
            if (name := self._suspicion()) != heard:
                heard = name
                if json.loads(self._store.get(f"suspects/{name}")).get(str(self._rank)) == own:
                    confirmed = name
                    self._expect_error()
                    self._store.add(f"confirmed/{name}", 1)
            if confirmed and self._store.check([f"deadlock/{confirmed}"]):
                lines = str(self._store.get(f"deadlock/{confirmed}").decode()).split("\n")
                self._store.add(f"told/{confirmed}", 1)
                return lines
            if time.monotonic() >= max(next_read, self._expected_until):  # not while another set is looked into
                pause = min(2 * pause, _LONGEST_PAUSE)
                next_read = time.monotonic() + pause
                found = self._deadlocked()
                if str(self._rank) in found and (lines := self._suspect(found)):
                    return lines
        return []

    # ---- the store -----------------------------------------------------------------------------------------------

    def _deadlocked(self) -> dict[str, str]:
        """Return what those ranks have written that will wait for ever; empty unless that is certain."""
        written = read_keys(self._store, {rank: f"waits/{rank}" for rank in range(self._world_size)})
        if len({Waiting.decode(text).call for text in written.values()}) == 1:
            return {}
        issued = self._store.multi_get([f"issued/{rank}" for rank in written])
        waiting = {
            rank: Waiting.decode(text, exchanges.decode())
            for (rank, text), exchanges in zip(written.items(), issued, strict=True)
        }
        return {str(rank): written[rank] for rank in deadlocked(waiting)}

    def _suspicion(self) -> str:
        return self._store.get("suspicion").decode() if self._store.check(["suspicion"]) else ""

    def _suspect(self, suspects: Mapping[str, str]) -> list[str]:
        """Ask ``suspects`` to confirm that they wait; if all do, write the lines of the error and return them."""
        name = secrets.token_hex(8)
        self._expect_error()
        self._store.set(f"suspects/{name}", json.dumps(suspects))
        self._store.set("suspicion", name)
        if not self._all_others(f"confirmed/{name}", len(suspects), lambda: self._suspicion() == name):
            return []
        lines = self._describe()
        with suppress(RuntimeError):  # the store ends with the rank that has it, which may be told first
            self._store.set(f"deadlock/{name}", "\n".join(lines))
            self._all_others(f"told/{name}", len(suspects))
        return lines

    def _all_others(self, key: str, ranks: int, goes_on: Callable[[], bool] = lambda: True) -> bool:
        """Wait until the others of so many ranks have added to ``key``; return whether they have, and in time."""
        until = time.monotonic() + _CONFIRM_SECONDS
        while self._store.add(key, 0) < ranks - 1:
            if self._ended.wait(_POLL_SECONDS / 5) or time.monotonic() > until or not goes_on():
                return False
        return True
