"""The happens-before checker: finds unordered accesses to the same bytes.

It is independent of torch. Its input is a sequence of operations, their accesses to bytes, allocations and frees.

A stream runs its operations in order. Operations of different streams are concurrent, unless an event, a
synchronization or a collective's ``wait`` orders them. Vector clocks (Lamport, 1978; Mattern, 1989) say so: a clock
holds, for each stream, the number of its operations that are known to be complete, and an operation happens before
another one if the clock of the other one counted it at the time of the issue.

Two accesses *race* if they overlap, at least one of them writes, and neither happens before the other. Memory is
*reused* too early if an allocation may receive bytes that an operation on another stream may still use. The allocator
is adversarial: an allocation may receive any block that was freed on its stream before. As in PyTorch's caching
allocator, a block that was recorded on a stream (``record_stream``) is reused only after that stream's uses of it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum

LIMIT = 512
"""Accesses kept per block. Beyond it, a write drops the ordered accesses that it covers."""


class Clock(dict[int, int]):
    """Operations known to be complete, by the ``id`` of their stream."""

    def join(self, other: Clock) -> None:
        """Take the maximum of both clocks, by stream."""
        for stream, time in other.items():
            if time > self.get(stream, 0):
                self[stream] = time

    def knows(self, other: Clock) -> bool:
        """Whether every operation that ``other`` counts is counted here."""
        return all(self.get(stream, 0) >= time for stream, time in other.items())


class Timeline:
    """A stream, or the host. The host runs its operations at their issue.

    Attributes:
        id: unique in this process.
        name: for reports.
        clock: counts the operations that are complete once this timeline's last operation is.
    """

    _ids = itertools.count(1)

    def __init__(self, name: str = "") -> None:
        self.id = next(Timeline._ids)
        self.name = name or f"stream {self.id}"
        self.clock = Clock()

    def issue(self, host: Timeline) -> int:
        """Issue an operation, after all that the host knows to be complete, and return its number on this timeline."""
        self.clock.join(host.clock)
        self.clock[self.id] = self.clock.get(self.id, 0) + 1
        return self.clock[self.id]

    def wait(self, clock: Clock) -> None:
        """Order the next operations after all operations that ``clock`` counts."""
        self.clock.join(clock)

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Kind(Enum):
    """The kind of a finding."""

    RACE = "race"
    REUSE = "reuse"


@dataclass(frozen=True)
class Operation:
    """The ``time``-th operation of a timeline.

    Attributes:
        site: the source location that issued it.
    """

    name: str
    timeline: Timeline
    time: int
    site: str

    def happens_before(self, timeline: Timeline) -> bool:
        """Whether it is complete before the last operation of ``timeline``."""
        return timeline.clock.get(self.timeline.id, 0) >= self.time

    def __str__(self) -> str:
        return f"{self.name} on {self.timeline.name} at {self.site}"


@dataclass(frozen=True)
class Access:
    """A read or write of the bytes from ``start`` up to ``stop`` by an operation."""

    start: int
    stop: int
    writes: bool
    operation: Operation

    def overlaps(self, other: Access) -> bool:
        return self.start < other.stop and other.start < self.stop

    def covers(self, other: Access) -> bool:
        """Whether it overwrites all that ``other`` accesses."""
        return self.writes and self.start <= other.start and other.stop <= self.stop

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} by {self.operation}"


@dataclass
class Block:
    """Memory between its allocation on ``timeline``, whose allocations may reuse it after the free, and that."""

    timeline: Timeline
    nbytes: int
    accesses: list[Access] = field(default_factory=list)  # that a later one could race with
    recorded: list[Timeline] = field(default_factory=list)  # their operations until the free precede any reuse
    before: list[Access] = field(default_factory=list)  # to earlier blocks at its bytes


@dataclass(frozen=True)
class Finding:
    """Two unordered accesses, in the order of their issue."""

    kind: Kind
    first: Access
    second: Access

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for findings of the same accesses: same kinds, operators, sites and streams."""
        return (self.kind, *(part for access in (self.first, self.second) for part in _describe(access)))

    def __str__(self) -> str:
        if self.kind is Kind.RACE:
            return f"race: {self.first}, and {self.second}, with nothing that orders them"
        return f"reuse: {self.second} may be given memory that is still in use: {self.first}"


class Checker:
    """Finds unordered accesses in a program, whose operations it receives in the order of their issue.

    Attributes:
        host: the timeline of the host.
        findings: the first of each ``Finding.key``.
    """

    def __init__(self) -> None:
        self.host = Timeline("host")
        self.findings: dict[tuple[object, ...], Finding] = {}
        self._freed: dict[int, list[Access]] = {}  # by timeline: uses of its freed memory that may be incomplete
        self._own: dict[int, Access] = {}  # by timeline: its own last use of these, complete for itself alone

    # ---- order -------------------------------------------------------------------------------------------------------

    def issue(self, timeline: Timeline, name: str, site: str = "") -> Operation:
        """Issue an operation to ``timeline``."""
        return Operation(name, timeline, timeline.issue(self.host), site)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def allocate(self, timeline: Timeline, nbytes: int) -> Block:
        """Allocate memory, which may reuse any memory that was freed on ``timeline``."""
        freed = _incomplete(self._freed.get(timeline.id, []), (self.host,))
        if timeline.id in self._freed:
            self._freed[timeline.id] = freed
        own = self._own.get(timeline.id)
        return Block(timeline, nbytes, before=list(freed) if own is None else [*freed, own])

    def free(self, block: Block) -> None:
        """Free the memory of ``block``."""
        # Reuse comes after the operations that the recorded timelines and the host have now, and where the new block is
        # used on the old one's timeline, or after it, also after those of that timeline.
        uses = _incomplete(block.accesses, (self.host, *block.recorded))
        for use in uses:
            own = self._own.get(block.timeline.id)
            if use.operation.timeline is block.timeline and (own is None or own.operation.time < use.operation.time):
                self._own[block.timeline.id] = use
        if uses := _incomplete(uses, (block.timeline,)):
            self._freed.setdefault(block.timeline.id, []).extend(uses)

    def access(self, block: Block, start: int, stop: int, writes: bool, operation: Operation) -> None:
        """Check and keep an access by ``operation``, which must be the last one of its timeline."""
        if start >= stop:
            return
        access = Access(start, stop, writes, operation)
        timeline = operation.timeline
        for use in block.before:
            if not use.operation.happens_before(timeline):
                self._found(Kind.REUSE, use, access)
        if writes and start <= 0 and stop >= block.nbytes:
            block.before = []  # a later access is ordered after this write, or races with it
        kept = []
        for other in block.accesses:
            ordered = other.operation.happens_before(timeline)
            if not ordered and (writes or other.writes) and access.overlaps(other):
                self._found(Kind.RACE, other, access)
            if not other.operation.happens_before(self.host):
                kept.append(other)
        if len(kept) >= LIMIT:
            kept = [each for each in kept if not (access.covers(each) and each.operation.happens_before(timeline))]
        kept.append(access)
        block.accesses = kept

    def _found(self, kind: Kind, first: Access, second: Access) -> None:
        finding = Finding(kind, first, second)
        self.findings.setdefault(finding.key, finding)


def _incomplete(uses: list[Access], timelines: tuple[Timeline, ...]) -> list[Access]:
    return [use for use in uses if not any(map(use.operation.happens_before, timelines))]


def _describe(access: Access) -> tuple[object, ...]:
    operation = access.operation
    return (access.writes, operation.name, operation.timeline.name, operation.site)
