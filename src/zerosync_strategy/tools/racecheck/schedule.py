"""A simulated program in simulated time: operations have given costs, and start as early as the order allows.

Also as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerosync_strategy.tools.racecheck.checker import Clock, Operation
from zerosync_strategy.tools.racecheck.recorder import Recorder

STEP = 10
"""The duration of every operation in a trace, in microseconds."""


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


def write_trace(simulation: Recorder, path: str | Path) -> None:
    """Write a track per stream, and an arrow for each new dependency between streams.

    Times are not measured: all operations have the same duration, and start as early as the order allows.
    """
    events: list[dict[str, Any]] = []
    for number, span in enumerate(schedule(simulation.operations, lambda operation: STEP)):
        here, common = span.operation.timeline.id, {"pid": 0, "cat": "operation"}
        events.append({
            "name": span.operation.name, "ph": "X", "ts": span.start, "dur": STEP, "tid": here,
            "args": {"site": span.operation.site}, **common,
        })  # fmt: skip
        for index, (timeline, end) in enumerate(span.waited):
            arrow = {"name": "wait", "id": f"{number}-{index}", "pid": 0, "cat": "wait"}
            events.append({"ph": "s", "ts": end - 1, "tid": timeline, **arrow})
            events.append({"ph": "f", "bp": "e", "ts": span.start, "tid": here, **arrow})
    timelines = {operation.timeline.id: operation.timeline.name for operation, _ in simulation.operations}
    for timeline, name in timelines.items():
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": timeline, "args": {"name": name}})
    Path(path).write_text(json.dumps({"traceEvents": events}))
