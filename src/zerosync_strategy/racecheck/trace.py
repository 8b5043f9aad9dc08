"""A picture of what waited for what: a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
from bisect import bisect_right
from pathlib import Path
from typing import Any

from zerosync_strategy.racecheck.simulation import Simulation

STEP = 10
"""Microseconds that every operation takes in the picture."""


def write_trace(simulation: Simulation, path: str | Path) -> None:
    """One track per stream, and an arrow for every wait that an operation was the first to come after.

    Times are not measured: each operation takes as long as any other, and starts as soon as the order allows.
    """
    events: list[dict[str, Any]] = []
    ended: dict[int, tuple[list[int], list[int]]] = {}  # by timeline: the numbers of its operations, and their ends
    known: dict[int, dict[int, int]] = {}  # by timeline: the clock of its last operation
    for number, (operation, clock) in enumerate(simulation.operations):
        here = operation.timeline.id
        start, waited = 0, []
        for timeline, time in clock.items():
            times, ends = ended.get(timeline, ([], []))
            index = bisect_right(times, time - (timeline == here)) - 1
            if index < 0:
                continue
            start = max(start, ends[index])
            if timeline != here and time > known.get(here, {}).get(timeline, 0):
                waited.append((timeline, ends[index]))
        known[here] = dict(clock)
        times, ends = ended.setdefault(here, ([], []))
        times.append(operation.time)
        ends.append(start + STEP)
        common = {"pid": 0, "cat": "operation"}
        events.append({
            "name": operation.name, "ph": "X", "ts": start, "dur": STEP, "tid": here,
            "args": {"site": operation.site}, **common,
        })  # fmt: skip
        for index, (timeline, end) in enumerate(waited):
            arrow = {"name": "wait", "id": f"{number}-{index}", "pid": 0, "cat": "wait"}
            events.append({"ph": "s", "ts": end - 1, "tid": timeline, **arrow})
            events.append({"ph": "f", "bp": "e", "ts": start, "tid": here, **arrow})
    timelines = {operation.timeline.id: operation.timeline.name for operation, _ in simulation.operations}
    for timeline, name in timelines.items():
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": timeline, "args": {"name": name}})
    Path(path).write_text(json.dumps({"traceEvents": events}))
