"""Tables in docs/compatibility.md, each between two marks, of which a run replaces the rows that it has run."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trials.matrix.environment import PACKAGES, ROOT

FILE = ROOT / "docs" / "compatibility.md"


@dataclass(frozen=True)
class Table:
    """Where a table stands and what it has.

    Attributes:
        begin, end: the lines before and after it.
        header: of its columns; the first names the row.
        aligned: how the columns are aligned, in Markdown.
    """

    begin: str
    end: str
    header: Sequence[str]
    aligned: Sequence[str]

    def render(self, rows: Mapping[str, list[str]]) -> str:
        """The lines of `rows`, by name, as a table."""
        lines = [self.header, self.aligned, *([name, *cells] for name, cells in rows.items())]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def read(self, text: str) -> dict[str, list[str]]:
        """The rows of the table in `text`, by name."""
        lines = self._between(text).splitlines()
        cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("|")]
        return {name: rest for name, *rest in cells[2:]}

    def update(self, new: Mapping[str, list[str]], order: list[str], file: Path = FILE) -> None:
        """Put the rows `new` into the table of `file`; rows that `order` does not name, leave it."""
        text = file.read_text()
        rows = {**self.read(text), **new}
        ordered = {name: rows[name] for name in order if name in rows}
        file.write_text(text.replace(self._between(text), f"\n\n{self.render(ordered)}\n\n"))

    def _between(self, text: str) -> str:
        found = re.search(f"{re.escape(self.begin)}(.*?){re.escape(self.end)}", text, re.DOTALL)
        if found is None:
            raise ValueError(f"the marks {self.begin!r} and {self.end!r} are missing")
        return found[1]


MATRIX = Table(
    "<!-- matrix: made by `make matrix` -->",
    "<!-- end of the matrix -->",
    ["row", "Python", *PACKAGES, "passed", "failed", "skipped", "date"],
    ["---", *[":---"] * (1 + len(PACKAGES)), *["---:"] * 3, ":---"],
)
