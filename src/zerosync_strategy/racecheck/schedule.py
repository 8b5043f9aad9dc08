"""When each operation of a simulated program would run, if it took so long and started as soon as the order allows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from zerosync_strategy.racecheck.checker import Operation
from zerosync_strategy.racecheck.clocks import Clock


@dataclass(frozen=True)
class Span:
    """One operation in time.

    Attributes:
        waited: the operations of other timelines that this one is the first on its own to come after, as (``id`` of the
            timeline, end).
    """

    operation: Operation
    start: float
    end: float
    waited: list[tuple[int, float]]


def schedule(
    operations: Iterable[tuple[Operation, Clock]],
    cost: Callable[[Operation], float],
    link: Callable[[Operation], Hashable] = lambda operation: None,
) -> list[Span]:
    """Run ``operations``, as :class:`Simulation` lists them, on a device that waits for nothing but what it must.

    Args:
        cost: how long an operation takes, in any unit.
        link: what operations share that cannot run at once, though on several timelines, such as a network interface:
            those of one link run in the order of their issue. ``None``: nothing.
    """
    spans = []
    ended: dict[int, tuple[list[int], list[float]]] = {}  # by timeline: the numbers of its operations, and their ends
    known: dict[int, Clock] = {}  # by timeline: the clock of its last operation
    nothing = Clock()
    free: dict[Hashable, float] = {}  # by link: when its last operation ends
    for operation, clock in operations:
        here = operation.timeline.id
        start, waited = 0.0, []
        for timeline, time in clock.items():
            times, ends = ended.get(timeline, ([], []))
            index = bisect_right(times, time - (timeline == here)) - 1
            if index < 0:
                continue
            start = max(start, ends[index])
            if timeline != here and time > known.get(here, nothing).get(timeline, 0):
                waited.append((timeline, ends[index]))
        known[here] = clock
        occupied = link(operation)
        if occupied is not None:
            start = max(start, free.get(occupied, 0.0))
        end = start + cost(operation)
        if occupied is not None:
            free[occupied] = end
        times, ends = ended.setdefault(here, ([], []))
        times.append(operation.time)
        ends.append(max(end, ends[-1] if ends else 0.0))
        spans.append(Span(operation, start, end, waited))
    return spans
