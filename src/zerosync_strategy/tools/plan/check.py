"""A plan against what a run logged."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerosync_strategy.tools.plan.jobs import ZEROSYNC, Cluster, OptionSet, Workload, cores
from zerosync_strategy.tools.plan.plan import MEASURE, Outcome, plan

BYTES, MEMORY = 0.01, 0.10
"""How far a plan may be from the run."""
SETTLING = 2
"""Lines that do not count: allocators, and the order of ZeRO-3's gathers, are not settled."""


@dataclass(frozen=True)
class Comparison:
    """One quantity: as planned, one value or two bounds, as run, and whether they agree within the ``limit``."""

    quantity: str
    planned: tuple[float, ...]
    ran: float
    holds: bool
    limit: str

    @property
    def off(self) -> float:
        """By which part the run is more than planned; 0 within bounds."""
        low, high = self.planned[0], self.planned[-1]
        return self.ran / high - 1 if self.ran > high else self.ran / low - 1 if self.ran < low else 0.0


@dataclass(frozen=True)
class Run:
    """What a run's steps were: medians over the lines of its log."""

    seconds: float
    bytes_sent: float
    peak_memory: float
    memory: str
    backwards: int
    stage: int
    options: dict[str, Any]
    ranks: int
    backend: str
    ranks_of_machine: int
    threads: int
    cores: int


def read_run(file: Path) -> Run:
    """Return the steps that a :class:`~zerosync_strategy.core.runlog.RunLog` has written.

    Raises:
        ValueError: there are too few, or they are not alike.
    """
    lines = [json.loads(line) for line in file.read_text().splitlines()][SETTLING:]
    if not lines:
        raise ValueError(f"--check {file}: found {SETTLING} steps or fewer. Log {SETTLING + 2} or more.")
    alike = ("memory", "backwards", "stage", "options", "ranks", "backend", "ranks_of_machine", "threads", "cores")
    for name in alike:
        if any(line[name] != lines[0][name] for line in lines):
            raise ValueError(f"--check {file}: {name!r} differs between its steps. Log steps that are alike.")
    measured = ("seconds", "bytes_sent", "peak_memory")
    medians = {name: statistics.median(line[name] for line in lines) for name in measured}
    return Run(**medians, **{name: lines[0][name] for name in alike})


def check(
    workload: Workload,
    cluster: Cluster,
    run: Run,
    compute: float | str = 0.0,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Comparison]:
    """Plan what ``run`` did, with its micro-batches, ranks and backend, and compare.

    Args:
        compute: as :func:`plan` takes it; 0 leaves the time out. ``"measure"`` trains as many ranks at once as shared a
            machine in the run, and belongs on a machine like that one.

    Raises:
        ValueError: the time is to be measured on other cores than the run's.
    """
    if compute == MEASURE and run.cores != cores():
        raise ValueError(
            f"--compute measure: found {cores()} core(s) here, the run had {run.cores}. Measure on one of its machines,"
            " or give the seconds of a micro-batch."
        )
    workload = dataclasses.replace(workload, micro_batches=run.backwards)
    cluster = dataclasses.replace(
        cluster, ranks=run.ranks, ranks_per_node=min(cluster.ranks_per_node, run.ranks), backend=run.backend
    )
    given = {name: value for name, value in run.options.items() if value is not None}
    options = {name: value for name, value in given.items() if value != 0 or name == "grad_memory_budget"}
    made = plan(
        workload, cluster, [OptionSet(ZEROSYNC, run.stage, options)], compute, progress=progress,
        at_once=run.ranks_of_machine, threads=run.threads,
    )  # fmt: skip
    return compare(made.outcomes[0], run)


def compare(outcome: Outcome, run: Run) -> list[Comparison]:
    """Compare one planned option set with a run of it."""
    memory = sum((outcome.peak if run.memory == "allocated" else outcome.resident).values())
    found = [
        _near("bytes sent", outcome.bytes_sent, run.bytes_sent, BYTES),
        _near(f"peak memory, {run.memory}", memory, run.peak_memory, MEMORY),
    ]
    if outcome.work.most:  # it is known
        low, high = outcome.time.lower, outcome.time.upper
        found.append(Comparison("seconds", (low, high), run.seconds, low <= run.seconds <= high, "within the bounds"))
    return found


def _near(quantity: str, planned: float, ran: float, limit: float) -> Comparison:
    holds = abs(ran - planned) <= limit * planned
    return Comparison(quantity, (planned,), ran, holds, f"within {limit:.0%}")
