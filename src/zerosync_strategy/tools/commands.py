"""What ``zerosync plan`` and ``zerosync doctor`` take, and how they print it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml  # noqa: F401  of the same extra: missing here rather than in the middle
from rich.progress import Progress

from zerosync_strategy.tools.display import console, show_check, show_finding, show_plan
from zerosync_strategy.tools.doctor.findings import Examination, Finding
from zerosync_strategy.tools.links import Links, parse_latency, parse_speed
from zerosync_strategy.tools.links import read as read_links
from zerosync_strategy.version import __version__

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
    help="Gradient synchronisation for DeepSpeed ZeRO.",
    epilog="zerosync run COMMAND, zerosync enable and zerosync disable: see zerosync run --help",
)  # fmt: skip
Latency = Annotated[str, typer.Option(metavar="TIME", help="of a small message, such as 20us")]
Speed = Annotated[str, typer.Option(metavar="SPEED", help="such as 400Gbit/s or 300GB/s")]


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
    dump: Annotated[
        Path | None, typer.Option(metavar="DIR", help="say why a run hangs or has ended, from ZEROSYNC_DUMP_DIR")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="say which checkpoints in it are whole, by reading their files")
    ] = None,
    link: Annotated[bool, typer.Option("--link", help="under torchrun: measure the links between the ranks")] = False,
    hosts: Annotated[
        str | None, typer.Option(metavar="HOST,HOST", help="measure the links between hosts; each NAME or NAME=ADDRESS")
    ] = None,
    shell: Annotated[str, typer.Option(help="for --hosts: what runs a command on {host}")] = "ssh {host}",
    per_host: Annotated[int, typer.Option(help="for --hosts: ranks on each")] = 1,
    within: Speed = "2400Gbit/s",
    between: Speed = "400Gbit/s",
    latency_within: Latency = "5us",
    latency_between: Latency = "20us",
    strict: Annotated[bool, typer.Option("--strict", help="exit with 1 where there is a warning, too")] = False,
    save: Annotated[Path | None, typer.Option(help="with --link: write what was measured, for plan --links")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
) -> None:
    """Say what is wrong with the installation, configurations, the links of a job, a run that hangs, or checkpoints.

    Exit status: 0, or 1 where there is an error, or 2 where the command itself is wrong.
    """
    shown = console(stderr=True)
    findings: Iterable[Finding]
    assumed = _links(within, between, latency_within, latency_between)
    # Each imports what it alone needs: torch may be what is missing.
    if hosts is not None:
        from zerosync_strategy.tools.doctor import hosts as several

        with _refusing("--hosts"):
            parsed = several.Host.parse_all(hosts)
        arguments = ["--within", within, "--between", between]
        arguments += ["--latency-within", latency_within, "--latency-between", latency_between]
        with shown.status(f"link test: {', '.join(host.name for host in parsed)}"):
            findings = several.check(parsed, arguments, shell, per_host)
    elif link:
        from zerosync_strategy.tools.doctor import link as links

        if not links.is_job():
            raise typer.BadParameter(
                "needs a job: torchrun ... -m zerosync_strategy doctor --link", param_hint="--link"
            )
        with shown.status("link test") as status:
            findings = links.check(assumed, saved_to=save, progress=lambda kind: status.update(f"link test: {kind}"))
        if not findings:  # another rank reports
            return
    elif dump is not None:
        from zerosync_strategy.tools.doctor import dump as dumps

        with _refusing("--dump"):
            findings = dumps.check(dump)
    elif checkpoint is not None:
        from zerosync_strategy.tools.doctor import checkpoints

        with _refusing("--checkpoint"), shown.status("reading checkpoints"):
            findings = checkpoints.check(checkpoint)
    else:
        findings = _examine(configurations or [], self_test, shown)
    made = []
    for finding in findings:
        made.append(finding)
        if not as_json:
            show_finding(finding)
    examination = Examination(tuple(made), strict)
    if as_json:
        print(examination.to_json())
    raise typer.Exit(examination.exit_status)


def _examine(configurations: list[Path], self_test: bool, shown: Any) -> Iterator[Finding]:
    from zerosync_strategy.tools.doctor import configurations as files
    from zerosync_strategy.tools.doctor import installation, selftest

    yield from installation.check_releases()
    yield from installation.check_machine()
    for path in configurations:
        yield from files.check(path)
    if self_test:
        with shown.status("self-test: two ranks train on stages 1, 2 and 3"):
            findings = selftest.check()
        yield from findings


@contextmanager
def _refusing(option: str | None = None) -> Iterator[None]:
    """Turn a wrong value, of ``option`` or of one that the error names, into an error of the command."""
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
    within: Speed = "2400Gbit/s",
    between: Speed = "400Gbit/s",
    latency_within: Latency = "5us",
    latency_between: Latency = "20us",
    links_file: Annotated[
        Path | None, typer.Option("--links", help="what doctor --link --save has measured; goes before those above")
    ] = None,
    backend: Annotated[str, typer.Option(help="nccl or gloo")] = "nccl",
    compute: Annotated[
        str, typer.Option(help="seconds of a micro-batch, forward and backward; or measure: by training here")
    ] = "0",
    ranks_at_once: Annotated[
        int | None, typer.Option(min=1, help="measured at once, which share this machine's cores; else those of a node")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="of torch, of each rank that is measured")] = 1,
    check: Annotated[Path | None, typer.Option(metavar="RUN.jsonl", help="compare with what a run has logged")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print all as JSON")] = False,
    png: Annotated[Path | None, typer.Option(help="draw memory against bytes; needs matplotlib")] = None,
    yaml_file: Annotated[Path | None, typer.Option("--yaml", help="write what is recommended, for Accelerate")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="replays at once; else one for each CPU")] = None,
    timeout: Annotated[float, typer.Option(help="seconds for all replays")] = 600.0,
) -> None:
    """Say what a training step will send and hold, by a replay of the real engine as one of so many ranks.

    Exit status: 0; 1 where a replay fails, nothing fits, or --check finds a difference; 2 where the command itself is
    wrong.
    """
    from zerosync_strategy.core.options.budgets import parse_bytes
    from zerosync_strategy.tools.plan import check as checks
    from zerosync_strategy.tools.plan import jobs, output
    from zerosync_strategy.tools.plan.plan import PlanError
    from zerosync_strategy.tools.plan.plan import plan as make_plan

    try:
        with _refusing():
            given = _read(config)
            links = slow = _links(within, between, latency_within, latency_between)
            if links_file is not None:
                slow, links = read_links(links_file, links)
            memory = None if device_memory is None else parse_bytes("--device-memory", device_memory)
            workload = jobs.Workload(model, _shape(batch), micro_batches, dtype, optimizer, given)
            cluster = jobs.Cluster(ranks, ranks_per_node, links, memory, backend, slow)
            seconds = _seconds(compute)
            stages = _stages(stage or ([given["zero_optimization"]["stage"]] if given else [1, 2, 3]))
            for option, file in (("--png", png), ("--yaml", yaml_file)):
                if file is not None and not file.absolute().parent.is_dir():
                    raise ValueError(f"{option} {file}: there is no folder {file.absolute().parent}.")
            if png is not None:
                output.require_matplotlib()
            with _replays() as show:
                if check is not None:
                    compared = checks.check(workload, cluster, checks.read_run(check), seconds, show)
                else:
                    sets = jobs.usual_sets(stages, stock, cluster, dtype)
                    made = make_plan(workload, cluster, sets, seconds, processes, timeout, show, ranks_at_once, threads)
    except PlanError as problem:
        console(stderr=True).print(str(problem), markup=False)
        raise typer.Exit(1) from None
    if check is not None:
        show_check(compared, as_json)
        raise typer.Exit(int(not all(each.holds for each in compared)))
    show_plan(made, as_json)
    if png is not None:
        output.draw(made, png)
    if yaml_file is not None and made.recommended is not None:
        yaml_file.write_text(output.accelerate_yaml(made, made.recommended))
    raise typer.Exit(int(made.recommended is None))


@contextmanager
def _replays() -> Iterator[Callable[[int, int], None]]:
    """Show a bar of how many replays are done; in a file or a pipe, a line for each."""
    shown = console(stderr=True)
    if not shown.is_terminal:
        yield lambda done, of: print(f"{done} of {of} replays", file=sys.stderr, flush=True)
        return
    with Progress(console=shown, transient=True) as bar:
        task = bar.add_task("replays", total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def _read(config: Path | None) -> dict[str, Any]:
    from zerosync_strategy.tools.doctor.configurations import read

    given = {} if config is None else read(config)
    if given and (given.get("zero_optimization") or {}).get("stage") not in (1, 2, 3):
        raise ValueError(f"--config {config}: 'zero_optimization.stage' takes 1, 2 or 3. Set it.")
    return given


def _shape(batch: str) -> tuple[int, ...]:
    sizes = batch.split("x")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(f"--batch takes a shape of positive sizes, such as 1x2048, got {batch!r}.")
    return tuple(map(int, sizes))


def _seconds(compute: str) -> float | str:
    from zerosync_strategy.tools.plan.plan import MEASURE

    try:
        seconds = compute if compute == MEASURE else float(compute)
    except ValueError:
        seconds = -1
    if seconds != MEASURE and not 0 <= float(seconds) < math.inf:
        raise ValueError(f"--compute takes seconds, 0 or more, or {MEASURE!r}, got {compute!r}.")
    return seconds


def _stages(stages: Sequence[int]) -> tuple[int, ...]:
    if wrong := [stage for stage in stages if stage not in (1, 2, 3)]:
        raise ValueError(f"--stage takes 1, 2 or 3, got {wrong[0]}.")
    return tuple(stages)


def _links(within: str, between: str, latency_within: str, latency_between: str) -> Links:
    with _refusing():
        return Links(
            parse_speed("--within", within), parse_speed("--between", between),
            parse_latency("--latency-within", latency_within), parse_latency("--latency-between", latency_between),
        )  # fmt: skip
