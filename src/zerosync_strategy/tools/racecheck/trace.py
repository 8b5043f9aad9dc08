"""Writes a simulation as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zerosync_strategy.tools.racecheck.schedule import schedule
from zerosync_strategy.tools.racecheck.simulation import Simulation

STEP = 10
"""The duration of every operation in the trace, in microseconds."""


def write_trace(simulation: Simulation, path: str | Path) -> None:
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
