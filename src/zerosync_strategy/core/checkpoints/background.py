"""Saves that a thread completes while training goes on: host copies of the values, and the agreement on the outcome.

Values are first copied to host memory, which is kept for the next save. Ranks agree over the process group's store, on
a connection of their own, because a collective of the thread could match one of training. The keys of a save::

    written      how many ranks have written their part, or failed; "all" is set when all have
    failed       how many have failed; error/1, error/2, ... are their errors
    end          set by the first rank: how the save ended; empty: it is complete
    raise_at     the step, counted since the save, at whose begin all ranks raise

The first rank sets ``raise_at`` in step n to n + 1. No rank can begin step n + 1 before the first one has taken part in
step n, so every rank reads the key after it was set.
"""

from __future__ import annotations

import atexit
import copy
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from zerosync_strategy.core.checkpoints.dcp import Content, Key, Piece
from zerosync_strategy.core.comm.collectives import timeout_of
from zerosync_strategy.core.engine.types import Store
from zerosync_strategy.core.failures.errors import UNWRITABLE, CheckpointError, in_words
from zerosync_strategy.core.failures.rank_status import rank_status
from zerosync_strategy.core.failures.words import ranks_text

_PREFIX = "zerosync/checkpoint"
_PAUSE_SECONDS = 0.5
"""The longest time between two looks at the store."""
_STOPPED_SECONDS = 3.0
"""How long ranks wait for one that writes nothing, if this one has stopped: other ranks may have ended."""
_FAREWELL_SECONDS = 10.0
"""How long the first rank, which may host the store, waits for others to read how the save ended."""


class Job(Protocol):
    """One save, as each rank completes it. ``id``: unique, the same on all ranks."""

    id: str

    @property
    def what(self) -> str: ...

    def complete(self) -> None:
        """Write this rank's part."""

    def publish(self) -> None:
        """On the first rank, after all ranks have written: make the checkpoint loadable."""

    def abandon(self) -> None:
        """On the first rank: remove what was written."""

    def missing(self) -> list[int]:
        """Return the ranks that have not written all."""

    def written_by(self, rank: int) -> int:
        """Return the bytes that ``rank`` has written until now."""


@dataclass
class _Pending:
    job: Job
    store: Store
    ended: Future[str]
    """The text of its error; empty: it is complete."""
    steps: int = 0
    """Begun since the save."""
    raise_at: int = 0
    then: list[Callable[[], None]] = field(default_factory=list)


class Background:
    """Completes one save at a time, in a thread of this rank. The methods are called on all ranks alike.

    Attributes:
        group: a weak reference to the process group, the default one.
    """

    def __init__(self, store: Store, group: dist.ProcessGroup) -> None:
        self.group = weakref.ref(group)
        self._rank, self._ranks, self._patience = group.rank(), group.size(), timeout_of(None).total_seconds() / 2
        self._status = rank_status()  # the program may destroy the process group before a save has ended
        self._hosted = store  # it may be hosted here: kept until the end
        self._store = store.clone()  # a connection is blocked while a thread waits on it
        self._thread = ThreadPoolExecutor(1, "zerosync-checkpoint")
        self._pending: _Pending | None = None
        atexit.register(self._exit)

    def start(self, job: Job) -> None:
        """Complete ``job`` in the background; an earlier one is waited for first."""
        self.wait()
        store = PrefixStore(f"{_PREFIX}/{job.id}", self._store)  # which may outlive a restart
        self._pending = _Pending(job, store, self._thread.submit(self._run, job, store))

    def after(self, then: Callable[[], None]) -> None:
        """Call ``then`` when the pending save is complete, or at once if none is pending; never, if it fails."""
        if self._pending is None:
            then()
            return
        self._pending.then.append(then)

    def step_begins(self) -> None:
        """Raise a ``CheckpointError``, on all ranks in the same step, if the pending save has failed."""
        pending = self._pending
        if pending is None:
            return
        pending.steps += 1
        ended = pending.ended.done()
        if ended and not pending.ended.result():
            self.wait()
        elif pending.raise_at == 0 and self._rank == 0 and ended:
            pending.raise_at = pending.steps + (self._ranks > 1)
            pending.store.set("raise_at", str(pending.raise_at))
        elif pending.raise_at == 0 and self._rank != 0 and pending.store.check(["raise_at"]):
            pending.raise_at = int(pending.store.get("raise_at"))
        if 0 < pending.raise_at <= pending.steps:
            self.wait()

    def wait(self) -> None:
        """Wait until no save is pending; raise a ``CheckpointError`` on all ranks if it has failed."""
        pending = self._pending
        if pending is None:
            return
        with self._status.activity(f"the wait for the attempt to {pending.job.what}"):
            text = pending.ended.result()
        self._pending = None
        for then in () if text else pending.then:
            then()
        if text:
            raise CheckpointError(f"Cannot {pending.job.what}: {text.rstrip('. ')}. {UNWRITABLE}")

    def _exit(self) -> None:
        try:
            self.wait()
        except CheckpointError as error:  # nobody is left to catch it
            print(f"{type(error).__name__}: {error}", file=sys.stderr)

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _run(self, job: Job, store: Store) -> str:
        try:
            return self._complete(job, store)
        except Exception as error:  # of the store: other ranks have ended
            return in_words(error)

    def _complete(self, job: Job, store: Store) -> str:
        try:
            job.complete()
        except Exception as error:
            store.set(f"error/{store.add('failed', 1)}", f"rank {self._rank}: {in_words(error)}")
        if store.add("written", 1) == self._ranks:
            store.set("all", "")
        if self._rank != 0:
            text = self._await(store, "end", lambda: [0], job) or store.get("end").decode()
            store.add("read", 1)
            return text
        text = self._await(store, "all", job.missing, job)
        if failed := store.add("failed", 0):
            text = "; ".join(store.get(f"error/{number}").decode() for number in range(1, failed + 1))
        if not text:
            try:
                job.publish()
            except Exception as error:
                text = in_words(error)
        if text:
            job.abandon()
        store.set("end", text)
        end = time.monotonic() + _FAREWELL_SECONDS
        while store.add("read", 0) < self._ranks - 1 and time.monotonic() < end and not self._status.has_stopped:
            time.sleep(0.01)
        return text

    def _await(self, store: Store, key: str, whom: Callable[[], Sequence[int]], job: Job) -> str:
        """Wait for ``key``. Return an error text if the ranks ``whom()`` write nothing for longer than the patience."""
        pause, looked = 0.01, time.monotonic()
        written: dict[int, int] = {}
        while not store.check([key]):
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECONDS)
            patience = min(self._patience, _STOPPED_SECONDS if self._status.has_stopped else self._patience)
            if time.monotonic() - looked < patience:
                continue
            now = {rank: job.written_by(rank) for rank in whom()}
            if now and now == written:
                return f"{ranks_text(list(now))}: nothing was written for {patience:.0f} s"
            looked, written = time.monotonic(), now
        return ""


current: Background | None = None
"""That of this process; ``None``: it has saved nothing in the background."""


def background() -> Background:
    """Return the background of this process in its default process group."""
    global current
    group = dist.distributed_c10d._get_default_group()
    if current is None or current.group() is not group:
        wait_for_save()  # of an earlier group
        current = Background(dist.distributed_c10d._get_default_store(), group)
    return current


def after_save(then: Callable[[], None]) -> None:
    """Call ``then`` when the pending save is complete, or at once if none is pending; never, if it fails."""
    if current is None:
        then()
    else:
        current.after(then)


def wait_for_save() -> None:
    """Wait until no save is pending, even after the process group was destroyed; raise if it has failed."""
    if current is not None:
        current.wait()


_ALIGNMENT = 64


class StagingMemory:
    """Host memory for a copy of one content, pinned if the values are on a device. It keeps :attr:`nbytes`."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        return self._memory.numel()

    @torch.no_grad()
    def of(self, content: Content) -> Content:
        """Return a copy of ``content``, complete on return. It overwrites the tensors of the previous copy."""
        pieces = [piece for of_key in content.tensors.values() for piece in of_key]
        devices = {piece.values.device for piece in pieces if piece.values.device.type != "cpu"}
        self._make_room(bytes_of(content), pinned=bool(devices))
        streams = {device: torch.Stream(device) for device in devices}
        for device, stream in streams.items():
            stream.wait_stream(torch.accelerator.current_stream(device))
        begin = 0
        copies: dict[Key, list[Piece]] = {}
        for key, of_key in content.tensors.items():
            copies[key] = []
            for piece in of_key:
                end = begin + piece.values.nbytes
                values = self._memory[begin:end].view(piece.values.dtype)
                begin += _room(piece)
                self._copy(values, piece, streams.get(piece.values.device))
                copies[key].append(replace(piece, values=values))
        for stream in streams.values():
            stream.synchronize()
        return replace(content, tensors=copies, objects=copy.deepcopy(content.objects))

    def _make_room(self, nbytes: int, pinned: bool) -> None:
        if self.nbytes < nbytes or self._memory.is_pinned() != pinned:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free it first
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)

    @staticmethod
    def _copy(target: torch.Tensor, piece: Piece, stream: torch.Stream | None) -> None:
        values = piece.values.reshape(-1)
        if stream is None:
            target.copy_(values)
            return
        with stream:
            target.copy_(values, non_blocking=True)


def bytes_of(content: Content) -> int:
    """Return the host memory that a copy of ``content`` takes."""
    return sum(_room(piece) for of_key in content.tensors.values() for piece in of_key)


def _room(piece: Piece) -> int:
    return -(-piece.values.nbytes // _ALIGNMENT) * _ALIGNMENT
