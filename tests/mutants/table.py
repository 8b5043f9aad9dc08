"""The tables in docs/mutants.md, after a mark."""

import datetime
import re
from collections.abc import Mapping, Sequence

from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.trial import Verdict

FILE = ROOT / "docs" / "mutants.md"
MARK = "<!-- made by `make mutants` -->"
NOTHING = "**nothing**"
UNTRIED = "not tried yet"


def write(tables: Mapping[str, Sequence[Mutant]], verdicts: Mapping[Mutant, Verdict], date: datetime.date) -> None:
    """Write the tables of all mutants: with their verdicts, and of those not tried now what the page has."""
    begin, _, before = FILE.read_text().partition(MARK)
    FILE.write_text(f"{begin}{MARK}\n\n{tables_of(tables, verdicts, date, before)}")


def tables_of(
    tables: Mapping[str, Sequence[Mutant]], verdicts: Mapping[Mutant, Verdict], date: datetime.date, before: str
) -> str:
    known = {
        line.split(" | ")[0] + " | " + line.split(" | ")[1]: line for line in re.findall(r"^\| .* \|$", before, re.M)
    }
    parts, lines = [], []
    for heading, mutants in tables.items():
        rows = [
            _line(mutant, verdicts[mutant])
            if mutant in verdicts
            else known.get(_start(mutant), f"{_start(mutant)} | | {UNTRIED} |")
            for mutant in mutants
        ]
        lines += rows
        parts.append(
            "\n".join(
                [f"\n## {heading}\n", "| rule | off, or changed | shows as | in |", "|---|---|---|---|", *rows, ""]
            )
        )
    found = sum(not line.endswith((f"| {NOTHING} |", f"| {UNTRIED} |")) for line in lines)
    return f"{found} of {len(lines)} are found. The last ones were tried on {date}.\n" + "".join(parts)


def _start(mutant: Mutant) -> str:
    return f"| {mutant.rule} | {mutant.what}"


def _line(mutant: Mutant, verdict: Verdict) -> str:
    on = ", simulated" if mutant.simulated else ""
    by = f"`{verdict.by}`{on}" if verdict.found else NOTHING
    return f"{_start(mutant)} | {verdict.how if verdict.found else ''} | {by} |"
