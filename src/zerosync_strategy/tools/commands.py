"""The arguments and the output of ``zerosync plan`` and ``zerosync doctor``, readable without colour and in a file."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml  # noqa: F401  from the same extra; if it is missing, fail here and not midway
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from zerosync_strategy.tools.doctor.findings import Finding, Severity
from zerosync_strategy.version import __version__

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


app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
    help="Gradient synchronisation for DeepSpeed ZeRO.",
    epilog="zerosync run COMMAND: see zerosync run --help",
)  # fmt: skip


def _print_version(value: bool) -> None:
    if value:
        print(f"zerosync {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Gradient synchronisation for DeepSpeed ZeRO."""


@app.command()
def doctor(
    configurations: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[CONFIGURATION]...", help="of DeepSpeed (JSON), Accelerate or LightningCLI (YAML)"),
    ] = None,
    self_test: Annotated[bool, typer.Option(help="train on two ranks, and compare with plain torch")] = True,
    gpus: Annotated[
        str | None,
        typer.Option(metavar="[N]", help="test on N GPUs, or on all: steps, bandwidth, a rank that fails"),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="say which checkpoints in it are whole, by reading their files")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="exit with 1 where there is a warning, too")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
) -> None:
    """Say what is wrong with the installation, configurations, or checkpoints.

    Exit status: 0, or 1 where there is an error, or 2 where the command itself is wrong.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks of tests end, too
    findings: Iterable[Finding]
    if checkpoint is not None:
        from zerosync_strategy.tools.doctor import checkpoints

        with _refusing("--checkpoint"):
            findings = checkpoints.check(checkpoint)
    else:
        findings = _examine(configurations or [], self_test, None if gpus is None else _ranks_on(gpus, self_test))
    made = []
    for finding in findings:
        made.append(finding)
        if not as_json:
            show_finding(finding)
    bad = (Severity.ERROR, Severity.WARNING) if strict else (Severity.ERROR,)
    status = int(any(finding.level in bad for finding in made))
    if as_json:
        print(json.dumps({"exit_status": status, "findings": [vars(finding) for finding in made]}, indent=1))
    raise typer.Exit(status)


def _ranks_on(gpus: str, self_test: bool) -> int:
    """Return on how many GPUs the tests run; 0 where none is visible."""
    from zerosync_strategy.tools.doctor.ranks import visible_gpus

    count = visible_gpus()
    wanted = count if gpus == "all" else int(gpus) if gpus.isdecimal() else 0
    with _refusing("--gpus"):
        if not self_test:
            raise ValueError("--gpus is a test, which --no-self-test leaves out. Leave out one of them.")
        if gpus != "all" and wanted < 1:
            raise ValueError(f"--gpus takes a number of GPUs, or nothing for all, got {gpus!r}.")
        if count and wanted > count:
            raise ValueError(f"--gpus got {wanted}, and {count} are visible. Look at CUDA_VISIBLE_DEVICES.")
    return min(wanted, count)


def _examine(configurations: list[Path], self_test: bool, gpus: int | None) -> Iterator[Finding]:
    # Imported here and not above, because torch itself may be missing.
    from zerosync_strategy.tools.doctor import configurations as files
    from zerosync_strategy.tools.doctor import installation, ranks

    yield from installation.check_releases()
    yield from installation.check_machine()
    for path in configurations:
        yield from files.check(path)
    if installation.installed("torch") is None:
        return  # an error says so above
    if gpus == 0:
        yield ranks.no_gpus()
    if gpus:
        with console(stderr=True).status(f"{gpus} GPU(s): training, measurements, and ranks that fail"):
            yield from ranks.check_gpus(gpus)
    elif self_test:
        with console(stderr=True).status("self-test: two ranks train on stages 1, 2 and 3"):
            finding = ranks.self_test()
        yield finding


@contextmanager
def _refusing(option: str | None = None) -> Iterator[None]:
    """Convert an error about a wrong value into an error of the command. It names ``option``, if given."""
    try:
        yield
    except (ValueError, OSError, KeyError, TypeError) as problem:
        raise typer.BadParameter(str(problem), param_hint=option) from None


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="package.module:function, a transformers configuration, or layers=,...")],
    ranks: Annotated[int, typer.Option(min=2, help="in all")] = 8,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="that share a node")] = 8,
    stage: Annotated[list[int] | None, typer.Option(help="of ZeRO; several times for several; else all")] = None,
    config: Annotated[Path | None, typer.Option(help="DeepSpeed's configuration; its stage is the one planned")] = None,
    batch: Annotated[str, typer.Option(help="shape of a micro-batch of one rank")] = "1x2048",
    micro_batches: Annotated[int, typer.Option(help="backwards per optimizer step")] = 1,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16")] = "bf16",
    optimizer: Annotated[str, typer.Option(help="of torch.optim, or package.module:function of the module")] = "AdamW",
    device_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="of one rank, such as 80GB")] = None,
    stock: Annotated[bool, typer.Option(help="stock DeepSpeed beside; on many ranks the slowest to replay")] = True,
    backend: Annotated[str, typer.Option(help="nccl or gloo")] = "nccl",
    as_json: Annotated[bool, typer.Option("--json", help="print all as JSON")] = False,
) -> None:
    """Say what a training step will send and hold, by a replay of the real engine as one of so many ranks.

    Exit status: 0; 1 where a replay fails or nothing fits; 2 where the command itself is wrong.
    """
    from zerosync_strategy.core.options import BLOCK, parse_bytes
    from zerosync_strategy.tools.doctor.configurations import read
    from zerosync_strategy.tools.plan import jobs
    from zerosync_strategy.tools.plan.plan import PlanError
    from zerosync_strategy.tools.plan.plan import plan as make_plan

    with _refusing():
        given = {} if config is None else read(config)
        memory = None if device_memory is None else parse_bytes("--device-memory", device_memory)
        workload = jobs.Workload(model, _shape(batch), micro_batches, dtype, optimizer, given)
        cluster = jobs.Cluster(ranks, ranks_per_node, memory, backend)
        stages = stage or ([given.get("zero_optimization", {}).get("stage")] if given else [1, 2, 3])
        if wrong := [each for each in stages if each not in (1, 2, 3)]:
            raise ValueError(f"--stage, or 'zero_optimization.stage' in --config, takes 1, 2 or 3, got {wrong[0]}.")
        sets = jobs.usual_sets(tuple(stages), stock, cluster, given.get(BLOCK))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the replays end, too
    try:
        made = make_plan(
            workload, cluster, sets, lambda done, of: print(f"{done} of {of} replays", file=sys.stderr, flush=True)
        )
    except PlanError as problem:
        console(stderr=True).print(str(problem), markup=False)
        raise typer.Exit(1) from None
    show_plan(made, as_json)
    raise typer.Exit(int(made.recommended is None))


def _shape(batch: str) -> tuple[int, ...]:
    sizes = batch.split("x")
    if not all(map(str.isdecimal, sizes)):
        raise ValueError(f"--batch takes a shape of positive sizes, such as 1x2048, got {batch!r}.")
    return tuple(map(int, sizes))
