"""The tables in docs/mutants.md, after a mark."""

import datetime
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.targets import TARGETS, targets_of
from tests.mutants.trial import Verdict

FILE = ROOT / "docs" / "mutants.md"
MARK = "<!-- made by `make mutants` -->"
NOTHING = "**nothing**"
UNTRIED = "not tried yet"
ON = ", simulated"

Test = tuple[str, bool]
"""A node id below tests, and whether it runs on the simulated device."""


def write(tables: Mapping[str, Sequence[Mutant]], verdicts: Mapping[Mutant, Verdict], date: datetime.date) -> None:
    """Write the tables of all mutants: with their verdicts, and of those not tried now what the page has."""
    begin, _, before = FILE.read_text().partition(MARK)
    FILE.write_text(f"{begin}{MARK}\n\n{tables_of(tables, verdicts, date, before)}")


def tables_of(
    tables: Mapping[str, Sequence[Mutant]],
    verdicts: Mapping[Mutant, Verdict],
    date: datetime.date,
    before: str,
    targets_of: Callable[[Iterable[Test]], Mapping[Test, str]] = targets_of,
) -> str:
    """Return the tables. ``before`` is the page, which has the rows of mutants that are not in ``verdicts``."""
    known = rows_of(before)
    rows = {
        mutant: _row(verdicts[mutant], mutant.simulated)
        if mutant in verdicts
        else known.get((mutant.rule, mutant.what), ("", UNTRIED))
        for mutants in tables.values()
        for mutant in mutants
    }
    tests = [test for _, by in rows.values() if (test := as_test(by))]
    targets = targets_of(tests)
    parts = []
    for heading, mutants in tables.items():
        parts += [f"\n## {heading}\n", "| rule | off, or changed | shows as | in | target |", "|---|---|---|---|---|"]
        for mutant in mutants:
            how, by = rows[mutant]
            target = f"`{targets[test]}`" if (test := as_test(by)) else ""
            parts.append(f"| {mutant.rule} | {mutant.what} | {how} | {by} | {target} |")
        parts.append("")
    counts = Counter(targets[test] for test in tests)
    by_target = ", ".join(f"{counts[target]} by `{target}`" for target in TARGETS if counts[target])
    summary = f"{len(tests)} of {len(rows)} are found: {by_target}. The last ones were tried on {date}.\n"
    return summary + "\n".join(parts)


def rows_of(page: str) -> dict[tuple[str, str], tuple[str, str]]:
    """Return how and by what each mutant is found, of the tables of a page."""
    cells = [line[2:-2].split(" | ") for line in re.findall(r"^\| .* \|$", page, re.MULTILINE)]
    return {(rule, what): (how.strip(), by) for rule, what, how, by, *_ in cells}


def as_test(by: str) -> Test | None:
    """Return the node id in a cell, and whether it runs on the simulated device; None where nothing has found it."""
    found = re.fullmatch(rf"`(.*)`({ON})?", by)
    return (found[1], bool(found[2])) if found else None


def _row(verdict: Verdict, simulated: bool) -> tuple[str, str]:
    return (verdict.how, f"`{verdict.by}`{ON if simulated else ''}") if verdict.found else ("", NOTHING)
