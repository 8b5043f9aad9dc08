"""The matrix itself: lower bounds that are tested, and a table that a run of one row leaves whole."""

import re
from pathlib import Path

import pytest

from trials.matrix.__main__ import changes, counts_in
from trials.matrix.environment import PACKAGES, ROOT, Environment, InstallError
from trials.matrix.rows import ROWS, Row
from trials.matrix.table import MATRIX as table
from zerosync_strategy.core.engine import contract


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_lower_bounds_are_what_a_row_runs() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for package in PACKAGES:
        (bound,) = set(re.findall(rf'"{package}>=([\d.]+)"', text))
        oldest = min((row.pins[package] for row in ROWS if package in row.pins), key=number)
        assert number(oldest)[: len(number(bound))] == number(bound), package
    assert f'requires-python = ">={min((row.python for row in ROWS if row.python), key=number)}"' in text
    assert f'"deepspeed>={contract.DEEPSPEED.oldest}"' in text


def test_a_row_takes_its_place_and_leaves_the_others(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"before\n\n{table.begin}\n\n{table.end}\n\nafter\n")
    cells = {name: [name[0]] * (len(table.header) - 1) for name in ("one", "two", "three")}
    for names in (["two"], ["three", "one"], ["two"]):
        table.update({name: cells[name] for name in names}, ["one", "two", "three"], file)
    assert list(table.read(file.read_text()).items()) == list(cells.items())
    table.update({"two": ["new"] * 10}, ["one", "two"], file)
    text = file.read_text()
    assert table.read(text) == {"one": cells["one"], "two": ["new"] * 10}
    assert text.startswith("before\n") and text.endswith("\n\nafter\n")


def test_the_canary_names_what_is_newer() -> None:
    pins = (ROOT / "constraints.txt").read_text()
    tested = [re.search(rf"^{package}==([\d.]+)", pins, re.MULTILINE)[1] for package in PACKAGES]  # type: ignore[index]
    assert changes(tested) == []
    assert changes([tested[0], "99.0", *tested[2:]]) == [f"deepspeed {tested[1]} -> 99.0"]


def test_errors_count_as_failures(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite tests="9" errors="1" failures="2" skipped="3"/></testsuites>')
    assert counts_in(report) == [3, 3, 3]


def test_an_interpreter_that_does_not_run_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim = tmp_path / "python9.9"
    shim.write_text("#!/bin/sh\necho none of this release >&2; exit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(InstallError, match="none of this release"):
        Environment(Row("row", python="9.9"), tmp_path / "row")
    assert not (tmp_path / "row").exists()
