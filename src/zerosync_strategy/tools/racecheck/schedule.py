"""A simulated program in simulated time: operations have given costs, and start as early as the order allows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from zerosync_strategy.tools.racecheck.checker import Operation
from zerosync_strategy.tools.racecheck.clocks import Clock


@dataclass(frozen=True)
class Span:
    """An operation with its start and its end.

    Attributes:
        waited: its new dependencies on other timelines, which no earlier operation of its own timeline had, as (``id``
            of the timeline, end).
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
    """Schedule ``operations``, in the form of :attr:`Simulation.operations`, each as early as its dependencies allow.

    Args:
        cost: the duration of an operation, in any unit.
        link: the resource that an operation occupies, such as a network interface. Operations of one link run one after
            the other, in the order of their issue, on whatever timelines. ``None``: no resource.
    """
    spans = []
    ended: dict[int, tuple[list[int], list[float]]] = {}  # by timeline: the times of its operations, and their ends
    known: dict[int, Clock] = {}  # by timeline: the clock of its last operation
    nothing = Clock()
    free: dict[Hashable, float] = {}  # by link: the end of its last operation
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
