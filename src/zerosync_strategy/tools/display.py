"""Findings as lines and plans as tables, readable without colour and in a file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from zerosync_strategy.tools.doctor.findings import Finding, Severity

if TYPE_CHECKING:
    from zerosync_strategy.tools.plan.plan import Plan

_COLOURS = {Severity.OK: "green", Severity.NOTE: "cyan", Severity.WARNING: "yellow", Severity.ERROR: "bold red"}
_WIDTH = 300  # of a table in a file or a pipe


def console(stderr: bool = False) -> Console:
    """Return a console; for a file or a pipe, without colour and with long lines."""
    made = Console(stderr=stderr, highlight=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, no_color=True, width=_WIDTH)


def show_finding(finding: Finding) -> None:
    """Print one finding of the doctor immediately, also to a file or a pipe."""
    out = console()
    line = Text(f"{finding.level.value:8}", style=_COLOURS[finding.level])
    line.append(f"{finding.topic:14}{finding.found}", style="default")
    out.print(line)
    if finding.remedy and finding.level is not Severity.OK:
        out.print(Text(f"{'':22}-> {finding.remedy}", style="default"))
    out.file.flush()


def show_plan(plan: Plan, as_json: bool) -> None:
    """Print a plan."""
    if as_json:
        print(plan.to_json())
        return
    out, cluster, work = console(), plan.cluster, plan.workload
    out.print(
        f"{plan.parameters / 1e9:.3g} G parameters, {work.dtype}, {work.micro_batches} micro-batch(es);"
        f" {cluster.ranks} ranks, {cluster.per_node} per node, as on {cluster.backend}. GB of one rank and step; peaks"
        " are of allocated memory.",
        markup=False,
    )
    table = Table(box=box.ASCII_DOUBLE_HEAD, pad_edge=False)
    kinds = [kind for kind in plan.outcomes[0].peak if any(each.peak[kind] for each in plan.outcomes)]
    left = ["left"] if cluster.memory is not None else []
    table.add_column("", no_wrap=True)
    table.add_column("options", no_wrap=True)
    copied = ["copies"] if any(each.copied_bytes for each in plan.outcomes) else []
    for column in ("sent", "between", "/ least", "calls", "peak", *kinds, *left, *copied):
        table.add_column(column, justify="right", no_wrap=True)
    best = plan.recommended
    for each in plan.outcomes:
        spare, sent = plan.fits(each), each.sent
        memory = [each.memory, *(each.peak[kind] for kind in kinds), *([] if spare is None else [spare])]
        memory += [each.copied_bytes] if copied else []
        table.add_row(
            ">" if each is best else "", each.options.name, f"{sent.bytes / 1e9:.3f}", f"{sent.between / 1e9:.3f}",
            f"{plan.over_floor(each):.3f}", str(sent.calls), *(f"{value / 1e9:.2f}" for value in memory),
        )  # fmt: skip
    least = (f"{value / 1e9:.3f}" for value in (plan.floor, plan.floor_between))
    table.add_row("", "least: each gradient once, and each trained parameter", *least)
    # In full width: a narrower terminal wraps its lines.
    out.width = max(out.width, Measurement.get(out, out.options.update(max_width=_WIDTH), table).maximum)
    out.print(table)
    if plan.left_out:
        out.print(f"left out, for {work.optimizer} needs whole parameters: {'; '.join(plan.left_out)}", markup=False)
    if plan.units:
        units = ", ".join(f"{number} {name}" for name, number in plan.units.items())
        largest = f"{plan.unit_bytes / 1e9:.3g} GB"
        out.print(f"ZeRO-3 gathers as wholes: {units}, of up to {largest} (unit_modules)", markup=False)
    of_what = "between nodes" if plan.floor_between else "sent"
    out.print(f"/ least: {of_what}, over the least that must be", markup=False)
    if copied:
        out.print("copies: in host memory, of what a checkpoint in the background has", markup=False)
    if best is None:
        out.print("Nothing fits. Use more ranks, smaller micro-batches, activation checkpointing or offload.")
    else:
        out.print(f"> recommended: of those that fit, it sends least. {json.dumps(best.configuration)}", markup=False)
