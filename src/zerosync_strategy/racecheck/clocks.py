"""Streams and events as vector clocks: what is known to be complete, and where.

A stream runs its operations in order. Everything else runs at the same time, unless an event, a synchronisation or a
collective's ``wait`` orders it. A clock says, for each stream, how many of its operations are known to be complete; an
operation happens before another if the other's clock, when it was issued, counted it (Lamport, 1978; Mattern, 1989).
"""

from __future__ import annotations

import itertools


class Clock(dict[int, int]):
    """Operations known to be complete, by the ``id`` of their stream."""

    def join(self, other: Clock) -> None:
        """Know also what ``other`` knows."""
        for stream, time in other.items():
            if time > self.get(stream, 0):
                self[stream] = time

    def knows(self, other: Clock) -> bool:
        """Whether all that ``other`` counts is counted here."""
        return all(self.get(stream, 0) >= time for stream, time in other.items())


class Timeline:
    """A stream, or the host, which is one too: its operations run as they are issued.

    Attributes:
        id: unique in this process.
        name: for reports.
        clock: what is complete once everything issued so far on it is.
    """

    _ids = itertools.count(1)

    def __init__(self, name: str = "") -> None:
        self.id = next(Timeline._ids)
        self.name = name or f"stream {self.id}"
        self.clock = Clock()

    def issue(self, host: Timeline) -> int:
        """Another operation, after all that the host knows to be complete; its number on this timeline."""
        self.clock.join(host.clock)
        self.clock[self.id] = self.clock.get(self.id, 0) + 1
        return self.clock[self.id]

    def wait(self, clock: Clock) -> None:
        """What comes next runs after everything that ``clock`` counts."""
        self.clock.join(clock)

    def __repr__(self) -> str:
        return f"<{self.name}>"
