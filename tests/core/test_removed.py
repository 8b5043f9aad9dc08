"""Public names that are gone say what to do instead, for one release."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import zerosync_strategy
from zerosync_strategy import (
    StepReport,
    ZeroSync,
    ZeroSyncConfig,
    ZeroSyncFabricStrategy,
    ZeroSyncMonitor,
    ZeroSyncPlugin,
    ZeroSyncStrategy,
    planning,
)
from zerosync_strategy.core.options.removed import COMMANDS, PLANNING, REMOVED, SINCE, removal
from zerosync_strategy.tools import cli

CHANGELOG = (Path(__file__).parent.parent.parent / "CHANGELOG.md").read_text()

OPTIONS: dict[str, Callable[[str], object]] = {
    "block": lambda name: ZeroSyncConfig.resolve({name: 1}),
    "keyword": lambda name: ZeroSyncConfig.resolve(None, {name: 1}),
    "config": lambda name: ZeroSyncConfig(**{name: 1}),  # type: ignore[arg-type]
    "lightning": lambda name: ZeroSyncStrategy(**{name: 1}),  # type: ignore[arg-type]
    "fabric": lambda name: ZeroSyncFabricStrategy(**{name: 1}),  # type: ignore[arg-type]
    "accelerate": lambda name: ZeroSyncPlugin(**{name: 1}),
}


def remedy(name: str) -> str:
    return f"'{name}' was removed in {SINCE}\\. {re.escape(REMOVED[name])}$"


@pytest.mark.parametrize("name", REMOVED)
def test_using_it_says_what_to_do_instead(name: str) -> None:
    for use in OPTIONS.values():
        with pytest.raises(ValueError, match=f"^ZeroSync option {remedy(name)}"):
            use(name)
    for owner in (ZeroSync, StepReport):
        with pytest.raises(AttributeError, match=remedy(name)):
            getattr(object.__new__(owner), name)
    for module in ("zerosync_strategy", "zerosync_strategy.planning"):
        with pytest.raises(ImportError, match=remedy(name)):
            exec(f"from {module} import {name}")


@pytest.mark.parametrize("name", PLANNING)
def test_planning_says_what_to_do_instead(name: str) -> None:
    for call in (planning.plan, planning.Cluster, planning.usual_sets):
        with pytest.raises(ValueError, match=f"'{name}' was removed in {SINCE}\\. {re.escape(PLANNING[name])}$"):
            call(**{name: 1})
    for owner in (planning.Plan, planning.Outcome, planning.Cluster):
        with pytest.raises(AttributeError, match=f"'{name}' was removed in {SINCE}"):
            getattr(object.__new__(owner), name)


def test_arguments_say_what_to_do_instead() -> None:
    with pytest.raises(ValueError, match=f"^ZeroSyncMonitor argument {remedy('run_log')}"):
        ZeroSyncMonitor(run_log="")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=f"^full_weights\\(\\) argument {remedy('changes_since')}"):
        object.__new__(ZeroSync).full_weights(changes_since=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_to_do_instead(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *option = name.split()
    for words in ([command, "model", *option, "1"], [command, *(f"{each}=1" for each in option)]):
        with pytest.raises(SystemExit, match=r"^2$"):
            cli.main(words)
        assert capsys.readouterr().err == f"'zerosync {name}' was removed in {SINCE}. {COMMANDS[name]}\n"


def test_the_changelog_has_each_in_its_table() -> None:
    table = CHANGELOG.split("\n| removed | do instead |\n|---|---|\n", 1)[1].split("\n\n")[0]
    removed = {*re.findall(r"[\w-]+", "".join(row.split(" | ")[0] for row in table.splitlines()))}
    names = {*map(str, (*REMOVED, *PLANNING)), *(word for name in COMMANDS for word in name.split())}
    assert names - removed == set()


def test_other_names_are_unknown_as_ever() -> None:
    assert removal("ZeroSync option", "nonsense") == removal("ZeroSync option", 1) == ""
    for owner in (zerosync_strategy, planning, object.__new__(ZeroSync), object.__new__(StepReport)):
        assert not hasattr(owner, "nonsense")
    with pytest.raises(ValueError, match=r"Unknown ZeroSync option 'coalesced'.* Did you mean 'coalesce'"):
        ZeroSyncConfig.resolve({"coalesced": True})


def test_the_table_is_of_one_release() -> None:
    """Once a later one is made, its rows go."""
    release, since = (tuple(map(int, text.split(".")[:2])) for text in (zerosync_strategy.__version__, SINCE))
    assert release <= since or not REMOVED
