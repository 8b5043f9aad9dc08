"""Mutants can be made of the package as it is, and their tests exist; trying them takes longer (`make mutants`)."""

import datetime
import re
from pathlib import Path

import pytest

from tests.harness.forked import fork_instead
from tests.mutants import TABLES, targets
from tests.mutants.mutant import ROOT, Mutant, read
from tests.mutants.table import FILE, as_test, rows_of, tables_of
from tests.mutants.trial import Verdict, verdict_of

MUTANTS = [mutant for mutants in TABLES.values() for mutant in mutants]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.rule} {mutant.what}")
def test_a_mutant_can_be_made(mutant: Mutant) -> None:
    """Of the lines that are there once, into what compiles, for tests that exist."""
    compile(mutant.source(), mutant.file, "exec")
    for test in mutant.tests:
        file, _, function = test.partition("::")
        name = re.escape(function.partition("[")[0])
        assert re.search(rf"^def {name}", (ROOT / "tests" / file).read_text(), re.MULTILINE), test


def test_nine_in_ten_are_found_by_make_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what has found them, and by which target runs that now."""
    fork_instead(monkeypatch, targets)
    page = FILE.read_text()
    (date,) = re.findall(r"The last ones were tried on (.*)\.\n", page)
    found = rows_of(page)
    tests = {mutant: as_test(found[mutant.rule, mutant.what][1]) for mutant in MUTANTS}
    assert [
        mutant.what
        for mutant, test in tests.items()
        if test is None or {test[0], test[0].partition("[")[0]}.isdisjoint(mutant.tests)
    ] == [], "not tried with the tests that they have now: make mutants WORDS='...'"
    tables = tables_of(TABLES, {}, datetime.date.fromisoformat(date), page)
    assert page.endswith(tables), "make mutants WORDS='...' writes the targets anew"
    assert 10 * tables.count("| `make test` |") >= 9 * len(MUTANTS)


def test_each_is_another_and_breaks_a_rule_that_is_written() -> None:
    assert len({(mutant.file, mutant.old, mutant.new, mutant.tests) for mutant in MUTANTS}) == len(MUTANTS)
    pages = "".join((ROOT / "docs" / page).read_text() for page in ("rules.md", "streams.md"))
    assert [mutant.rule for mutant in MUTANTS if f"**{mutant.rule}**" not in pages] == []


def test_what_is_no_mutant(tmp_path: Path) -> None:
    (tmp_path / "of.txt").write_text("B1: a wait\nin core/report.py\n-x\n")
    with pytest.raises(ValueError, match="no mutant"):
        list(read(tmp_path / "of.txt"))
    (tmp_path / "of.txt").write_text("B1: a wait\nin core/report.py\nby test_docs.py\n-not there\n")
    (mutant,) = read(tmp_path / "of.txt")
    with pytest.raises(ValueError, match=r"core/report\.py has 0 times"):
        mutant.source()


@pytest.mark.parametrize(
    ("case", "found", "how"),
    [
        ("<failure message='assert 1 == 2'>E assert</failure>", True, "result"),
        ("<failure message='E'>race: write by copy_, and read by add</failure>", True, "race"),
        ("<failure message='NameError: x'>E NameError</failure>", False, "a test that could not run"),
        ("<error message='no fixture'/>", False, "a test could not be set up"),
        ("", False, "1 tests passed, 0 were left out"),
        ("<skipped/>", False, "0 tests passed, 1 were left out"),
    ],
)
def test_only_a_test_that_ran_and_failed_has_found_one(case: str, found: bool, how: str, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        f'<testsuites><testsuite><testcase classname="tests.a" name="b">{case}</testcase></testsuite></testsuites>'
    )
    verdict = verdict_of(report)
    assert (verdict.found, verdict.how) == (found, how)


def test_rows_that_are_not_tried_keep_their_verdicts() -> None:
    tables = {"Waits": [mutant for mutant in MUTANTS if mutant.rule == "B1"][:3]}
    first, second, third = tables["Waits"]
    date = datetime.date(2026, 11, 24)
    targets = {("a.py::b", False): "make test", ("c.py::d", False): "make test-all"}
    verdicts = {first: Verdict(True, "a.py::b", "race", 1), second: Verdict(False, "", "", 1)}
    before = tables_of(tables, verdicts, date, "", lambda tests: targets)
    after = tables_of(tables, {second: Verdict(True, "c.py::d", "result", 1)}, date, before, lambda tests: targets)
    assert before.startswith("1 of 3 are found: 1 by `make test`.")
    assert after.startswith("2 of 3 are found: 1 by `make test`, 1 by `make test-all`.")
    assert [line for line in after.splitlines() if f" {first.what} " in line] == [
        f"| B1 | {first.what} | race | `a.py::b` | `make test` |"
    ]
    assert f"| B1 | {third.what} |  | not tried yet |  |" in after
