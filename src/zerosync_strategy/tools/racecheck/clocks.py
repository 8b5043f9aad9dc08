"""Vector clocks of streams and events (Lamport, 1978; Mattern, 1989).

A stream runs its operations in order. Operations of different streams are concurrent, unless an event, a
synchronization or a collective's ``wait`` orders them. A clock holds, for each stream, the number of its operations
that are known to be complete. An operation happens before another one if the clock of the other one counted it at the
time of the issue.
"""

from __future__ import annotations

import itertools


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
        """Issue an operation, after all operations that the host knows to be complete.

        Returns:
            Its number on this timeline.
        """
        self.clock.join(host.clock)
        self.clock[self.id] = self.clock.get(self.id, 0) + 1
        return self.clock[self.id]

    def wait(self, clock: Clock) -> None:
        """Order the next operations after all operations that ``clock`` counts."""
        self.clock.join(clock)

    def __repr__(self) -> str:
        return f"<{self.name}>"
