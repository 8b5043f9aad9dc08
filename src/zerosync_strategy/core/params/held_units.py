"""Which units of ZeRO-3 have all their parameters held or persistent, and by which messages these are gathered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.engine.parameter import Record
from zerosync_strategy.core.params.held import HoldPlan
from zerosync_strategy.core.params.scheduler import GatherScheduler
from zerosync_strategy.core.params.units import Unit


@dataclass
class HeldRun:
    """Held parameters that are gathered by one message.

    Attributes:
        place: among all runs; those of a process group follow each other.
        group: the place of the process group in the order of gathers (U1).
        params: in the order in which they were built.
        issued: in this window: what was missing is gathered, or on its way.
    """

    place: int
    group: int
    params: list[Any]
    issued: bool = False


def held_runs(units: Iterable[Unit], plan: HoldPlan, scheduler: GatherScheduler) -> list[HeldRun]:
    """Let those ``units`` know which of all that stays until the step is theirs; return the runs of that."""
    held = {}
    for unit in units:
        unit.held = None
        if plan.holds_all or (unit.params and all(map(_stays, unit.records))):
            held[unit] = unit.params
    by_id = {zero3.param_id(param): param for params in held.values() for param in params}
    unit_of = {param: unit for unit, params in held.items() for param in params}
    found: list[HeldRun] = []
    run_of: dict[int, HeldRun] = {}
    for trains in (True, False):  # apart, since those that are frozen are gathered once
        params = [param for param in by_id.values() if param.requires_grad == trains]
        for group, runs in scheduler.runs(params, unit_of):
            for members in runs:
                found.append(run := HeldRun(len(found), group, members))
                run_of.update((zero3.param_id(param), run) for param in members)
    for unit, params in held.items():
        unit.held = [found[place] for place in sorted({run_of[zero3.param_id(param)].place for param in params})]
    return found


def _stays(record: Record) -> bool:
    return record.hold or zero3.is_persistent(record.param)
