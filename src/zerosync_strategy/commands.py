"""What ``zerosync plan`` and ``zerosync doctor`` take, and how they print it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml  # noqa: F401  of the same extra: missing here rather than in the middle
from rich.console import Console
from rich.text import Text

from zerosync_strategy.doctor.findings import Examination, Finding, Level
from zerosync_strategy.links import Links, parse_speed
from zerosync_strategy.version import __version__

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
    help="Gradient synchronisation for DeepSpeed ZeRO.",
)  # fmt: skip
_COLOURS = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red"}
_DEFAULT = Links()
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


def console(stderr: bool = False) -> Console:
    """Return a console; in a file or a pipe it has no colour and breaks no line."""
    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal:
        made = Console(stderr=stderr, highlight=False, no_color=True, width=1000)
    return made


@app.command()
def doctor(
    configurations: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[CONFIGURATION]...", help="of DeepSpeed (JSON), Accelerate or LightningCLI (YAML)"),
    ] = None,
    self_test: Annotated[bool, typer.Option(help="train on two ranks, and compare with plain torch")] = True,
    link: Annotated[bool, typer.Option("--link", help="under torchrun: measure the links between the ranks")] = False,
    within: Speed = "2400Gbit/s",
    between: Speed = "400Gbit/s",
    as_json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
) -> None:
    """Say what is wrong with the installation, the configurations, and the links of a job.

    Exit status: 0, or 1 where there is an error, or 2 where the command itself is wrong.
    """
    from zerosync_strategy.doctor import link as links

    shown = console(stderr=True)
    if link:
        if not links.is_job():
            raise typer.BadParameter(
                "needs a job: torchrun ... -m zerosync_strategy doctor --link", param_hint="--link"
            )
        assumed = Links(_speed("--within", within), _speed("--between", between))
        with shown.status("link test") as status:
            findings = links.check(assumed, progress=lambda kind: status.update(f"link test: {kind}"))
        if not findings:  # another rank reports
            return
    else:
        findings = _examine(configurations or [], self_test, shown)
    examination = Examination(tuple(findings))
    if as_json:
        print(examination.to_json())
    else:
        _print(examination)
    raise typer.Exit(examination.exit_status)


def _examine(configurations: list[Path], self_test: bool, shown: Console) -> list[Finding]:
    from zerosync_strategy.doctor import configurations as files
    from zerosync_strategy.doctor import environment, releases, selftest

    findings = [*releases.check(), *environment.check()]
    for path in configurations:
        findings += files.check(path)
    if self_test:
        with shown.status("self-test: two ranks train on stages 1, 2 and 3"):
            findings += selftest.check()
    return findings


def _print(examination: Examination) -> None:
    out = console()
    for finding in examination.findings:
        line = Text(f"{finding.level.value:8}", style=_COLOURS[finding.level])
        line.append(f"{finding.topic:14}{finding.found}", style="default")
        out.print(line)
        if finding.remedy and finding.level is not Level.OK:
            out.print(Text(f"{'':22}-> {finding.remedy}", style="default"))


def _speed(option: str, value: str) -> float:
    try:
        return parse_speed(option, value)
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from None
