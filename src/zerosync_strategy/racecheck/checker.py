"""The happens-before checker: finds accesses to the same bytes that nothing orders.

It knows nothing of torch: it is told of operations, of the bytes that they read and write, of memory that is allocated
and freed. Two accesses *race* if they overlap, one of them writes, and neither happens before the other. Memory is
*reused* too early if an allocation may be given bytes that an operation on another stream may still use: the allocator
is taken to be adversarial, and to give an allocation any block that was freed on its stream before. As in PyTorch's
caching allocator, a block that was recorded on a stream (``record_stream``) comes back only once that stream's uses of
it are complete.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from zerosync_strategy.racecheck.clocks import Timeline

LIMIT = 512
"""Accesses that are kept per block before those are dropped that a later write covers."""


class Kind(Enum):
    """What two accesses do to each other."""

    RACE = "race"
    REUSE = "reuse"


@dataclass(frozen=True)
class Operation:
    """Something that ran on a timeline, as the ``time``-th there.

    Attributes:
        site: the place in the code that issued it.
    """

    name: str
    timeline: Timeline
    time: int
    site: str

    def happens_before(self, timeline: Timeline) -> bool:
        """Whether it is complete before whatever was issued last on ``timeline``."""
        return timeline.clock.get(self.timeline.id, 0) >= self.time

    def __str__(self) -> str:
        return f"{self.name} on {self.timeline.name} at {self.site}"


@dataclass(frozen=True)
class Access:
    """Bytes from ``start`` up to ``stop`` that an operation reads or writes."""

    start: int
    stop: int
    writes: bool
    operation: Operation

    def overlaps(self, other: Access) -> bool:
        return self.start < other.stop and other.start < self.stop

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} by {self.operation}"


@dataclass
class Block:
    """Memory from its allocation until it is freed.

    Attributes:
        timeline: where it was allocated, and where its bytes return to.
        nbytes: its size.
        accesses: those that a later one could race with.
        recorded: timelines that the allocator waits for, as they are when it is freed, before it gives the bytes away.
        before: accesses to what its bytes may have been before.
    """

    timeline: Timeline
    nbytes: int
    accesses: list[Access] = field(default_factory=list)
    recorded: list[Timeline] = field(default_factory=list)
    before: list[Access] = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """Two accesses that nothing orders, the earlier issued first."""

    kind: Kind
    first: Access
    second: Access

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for findings that say the same: the same two kinds of access at the same places on the same streams."""
        return (self.kind, *(part for access in (self.first, self.second) for part in _describe(access)))

    def __str__(self) -> str:
        if self.kind is Kind.RACE:
            return f"race: {self.first}, and {self.second}, with nothing that orders them"
        return f"reuse: {self.second} may be given memory that is still in use: {self.first}"


class Checker:
    """Takes note of a program's operations as they are issued, and finds what is not ordered.

    Attributes:
        host: the timeline of the host.
        findings: one for each ``Finding.key``, with how often it was found.
    """

    def __init__(self) -> None:
        self.host = Timeline("host")
        self.findings: dict[tuple[object, ...], tuple[Finding, int]] = {}
        self._freed: dict[int, list[Access]] = {}  # by timeline: uses of what was freed there, not known to be complete

    # ---- order -----------------------------------------------------------------------------------------------------

    def issue(self, timeline: Timeline, name: str, site: str = "") -> Operation:
        """An operation begins on ``timeline``, after everything before it there."""
        return Operation(name, timeline, timeline.issue(self.host), site)

    def synchronize(self, timeline: Timeline) -> None:
        """The host waits for everything issued on ``timeline`` so far."""
        self.host.wait(timeline.clock)

    # ---- memory ----------------------------------------------------------------------------------------------------

    def allocate(self, timeline: Timeline, nbytes: int) -> Block:
        """New memory, in whose place anything may have been that was freed on ``timeline``."""
        freed = [use for use in self._freed.get(timeline.id, ()) if not use.operation.happens_before(self.host)]
        if timeline.id in self._freed:
            self._freed[timeline.id] = freed
        return Block(timeline, nbytes, before=list(freed))

    def free(self, block: Block) -> None:
        """Nothing refers to the memory any more."""
        # Whoever is given the memory next comes after what its own timeline had, and the recorded ones.
        waited = (self.host, block.timeline, *block.recorded)
        uses = [use for use in block.accesses if not any(map(use.operation.happens_before, waited))]
        if uses:
            self._freed.setdefault(block.timeline.id, []).extend(uses)

    def access(self, block: Block, start: int, stop: int, writes: bool, operation: Operation) -> None:
        """``operation``, the last one on its timeline, reads or writes these bytes."""
        if start >= stop:
            return
        access = Access(start, stop, writes, operation)
        timeline = operation.timeline
        for use in block.before:
            if not use.operation.happens_before(timeline):
                self._found(Kind.REUSE, use, access)
        if writes and start <= 0 and stop >= block.nbytes:
            block.before = []  # what follows is ordered after this write, or races with it
        kept = []
        for other in block.accesses:
            ordered = other.operation.happens_before(timeline)
            if not ordered and (writes or other.writes) and access.overlaps(other):
                self._found(Kind.RACE, other, access)
            if not other.operation.happens_before(self.host):
                kept.append(other)
        if len(kept) >= LIMIT:
            kept = [
                other
                for other in kept
                if not (
                    writes and start <= other.start and other.stop <= stop and other.operation.happens_before(timeline)
                )
            ]
        kept.append(access)
        block.accesses = kept

    def _found(self, kind: Kind, first: Access, second: Access) -> None:
        finding = Finding(kind, first, second)
        known, times = self.findings.get(finding.key, (finding, 0))
        self.findings[finding.key] = (known, times + 1)


def _describe(access: Access) -> tuple[object, ...]:
    operation = access.operation
    return (access.writes, operation.name, operation.timeline.name, operation.site)
