"""Plans and comparisons as tables, readable without colour and in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from zerosync_strategy.tools.doctor.findings import Finding, Level

if TYPE_CHECKING:
    from zerosync_strategy.tools.plan.check import Comparison
    from zerosync_strategy.tools.plan.plan import Outcome, Plan

_COLOURS = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red"}
_WIDTH = 300  # of a table in a file or a pipe
_KINDS = ("parameters", "gradients", "optimizer", "gathered", "node shards", "buckets", "activations")


def console(stderr: bool = False) -> Console:
    """Return a console; in a file or a pipe it has no colour, and lines as long as they need to be."""
    made = Console(stderr=stderr, highlight=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, no_color=True, width=_WIDTH)


def show_finding(finding: Finding) -> None:
    """Print one finding of the doctor at once, in a file or a pipe too."""
    out = console()
    line = Text(f"{finding.level.value:8}", style=_COLOURS[finding.level])
    line.append(f"{finding.topic:14}{finding.found}", style="default")
    out.print(line)
    if finding.remedy and finding.level is not Level.OK:
        out.print(Text(f"{'':22}-> {finding.remedy}", style="default"))
    out.file.flush()


def show_plan(plan: Plan, as_json: bool) -> None:
    """Print a plan."""
    if as_json:
        print(plan.to_json())
        return
    out, cluster, work = console(), plan.cluster, plan.workload
    knows_memory, knows_work = cluster.memory is not None, all(each.work.most for each in plan.outcomes)
    out.print(
        f"{plan.parameters / 1e9:.3g} G parameters, {work.dtype}, {work.micro_batches} micro-batch(es)"
        f" of {_batch(plan)}; {cluster.ranks} ranks, {cluster.per_node} per node, as on"
        f" {cluster.backend}. GB of one rank and step; peaks are of allocated memory.",
        markup=False,
    )
    table = Table(box=box.ASCII_DOUBLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("options", no_wrap=True)
    left = ["left"] if knows_memory else []
    kinds = [kind for kind in _KINDS if kind != "node shards" or cluster.has_levels]
    for column in ("sent", "within", "between", "/ least", "calls", "peak", *kinds, "seconds", *left):
        table.add_column(column, justify="right", no_wrap=True)
    front, best, floor = plan.front, plan.recommended, plan.floor
    for each in plan.outcomes:
        low, high = each.time.lower, each.time.upper
        seconds = f"{low:.3g} to {high:.3g}" if knows_work else f"{low:.3g} + compute"
        left = [] if (spare := plan.fits(each)) is None else [f"{spare / 1e9:.2f}"]
        table.add_row(
            ">" if each is best else "*" if each in front else "", each.options.name,
            *(f"{value / 1e9:.3f}" for value in (each.bytes_sent, each.sent.within, each.sent.between)),
            f"{plan.over_floor(each):.3f}", str(each.calls),
            *(f"{value / 1e9:.2f}" for value in (each.memory, *(each.peak[kind] for kind in kinds))), seconds, *left,
        )  # fmt: skip
    least = (f"{value / 1e9:.3f}" for value in (floor.sent, floor.within, floor.between))
    table.add_row("", "least: each gradient once, and each trained parameter", *least)
    _print(out, table)
    if plan.left_out:
        out.print(f"left out, for {work.optimizer} needs whole parameters: {'; '.join(plan.left_out)}", markup=False)
    if plan.measured is not None:
        out.print(f"seconds: of the rank's own work, measured by {plan.measured}, and of the links", markup=False)
    out.print(
        "* on the front of memory against the links' time; > recommended: of those that fit, links are busy for the"
        " least time with its bytes", markup=False,
    )  # fmt: skip
    of_what = "between nodes" if floor.between else "sent"
    out.print(f"/ least: {of_what}, over the least that must be", markup=False)
    out.print(_advice(best), markup=False)


def _batch(plan: Plan) -> str:
    own = "" if plan.batch == plan.workload.batch else " (the model's own; --batch is not used)"
    return "x".join(map(str, plan.batch)) + own


def _advice(best: Outcome | None) -> str:
    if best is None:
        return "Nothing fits. Use more ranks, smaller micro-batches, activation checkpointing or offload."
    return json.dumps(best.configuration)


def show_check(compared: Sequence[Comparison], as_json: bool) -> None:
    """Print what a plan and a run differ by."""
    if as_json:
        print(json.dumps([{**vars(each), "off": each.off} for each in compared], indent=1))
        return
    table = Table(box=box.ASCII_DOUBLE_HEAD, pad_edge=False)
    for column in ("quantity", "planned", "run", "off", "limit", "holds"):
        table.add_column(column, no_wrap=True)
    for each in compared:
        planned = " to ".join(f"{value:,.6g}" for value in each.planned)
        table.add_row(
            each.quantity, planned, f"{each.ran:,.6g}", f"{each.off:+.1%}", each.limit, "yes" if each.holds else "no"
        )
    _print(console(), table)


def _print(out: Console, table: Table) -> None:
    """Print ``table`` in full: on a terminal that is narrower, its lines go on in the next."""
    needed = Measurement.get(out, out.options.update(max_width=_WIDTH), table).maximum
    out.width = max(out.width, needed)
    out.print(table)
