"""The table in docs/compatibility.md, between two marks, of which each run replaces the rows that it has run."""

import re
from collections.abc import Mapping
from pathlib import Path

from tests.matrix.environment import PACKAGES, ROOT

FILE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- matrix: made by `make matrix` -->", "<!-- end of the matrix -->"
HEADER = ["row", "Python", *PACKAGES, "passed", "failed", "skipped", "date"]


def render(rows: Mapping[str, list[str]]) -> str:
    """The lines of `rows`, by name, as a table."""
    aligned = ["---", *[":---"] * (1 + len(PACKAGES)), *["---:"] * 3, ":---"]
    lines = [HEADER, aligned, *([name, *cells] for name, cells in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def read(text: str) -> dict[str, list[str]]:
    """The rows of the table in `text`, by name."""
    lines = _between(text).splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("|")]
    return {name: rest for name, *rest in cells[2:]}


def update(new: Mapping[str, list[str]], order: list[str], file: Path = FILE) -> None:
    """Put the rows `new` into the table of `file`; rows that `order` does not name, leave it."""
    text = file.read_text()
    rows = {**read(text), **new}
    ordered = {name: rows[name] for name in order if name in rows}
    file.write_text(text.replace(_between(text), f"\n\n{render(ordered)}\n\n"))


def _between(text: str) -> str:
    found = re.search(f"{re.escape(BEGIN)}(.*?){re.escape(END)}", text, re.DOTALL)
    if found is None:
        raise ValueError(f"the marks {BEGIN!r} and {END!r} are missing")
    return found[1]
