"""The tables in docs/mutants.md, after a mark."""

import datetime
from collections.abc import Mapping, Sequence

from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.trial import Verdict

FILE = ROOT / "docs" / "mutants.md"
MARK = "<!-- made by `make mutants` -->"


def write(tables: Mapping[str, Sequence[Mutant]], verdicts: Mapping[Mutant, Verdict], date: datetime.date) -> None:
    """Write the tables of all mutants with their verdicts."""
    begin = FILE.read_text().partition(MARK)[0]
    found = sum(verdict.found for verdict in verdicts.values())
    parts = [f"{begin}{MARK}\n\nOn {date}, {found} of {len(verdicts)} were found.\n"]
    for heading, mutants in tables.items():
        lines = [_line(mutant, verdicts[mutant]) for mutant in mutants]
        parts.append(
            "\n".join(
                [f"\n## {heading}\n", "| rule | off, or changed | shows as | in |", "|---|---|---|---|", *lines, ""]
            )
        )
    FILE.write_text("".join(parts))


def _line(mutant: Mutant, verdict: Verdict) -> str:
    on = ", simulated" if mutant.simulated else ""
    by = f"`{verdict.by}`{on}" if verdict.found else "**nothing**"
    return f"| {mutant.rule} | {mutant.what} | {verdict.how if verdict.found else ''} | {by} |"
