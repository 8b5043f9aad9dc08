"""Writes the table of what is replaced in the process, ``patches.EVERY``, into docs/how.md.

python docs/_site/replaced.py
"""

import re
from pathlib import Path

from zerosync_strategy.core.engine import patches

PAGE = Path(__file__).parent.parent / "how.md"
TABLE = re.compile(
    r"(?<=<!-- replaced: made by `python docs/_site/replaced.py` -->\n\n).*?(?=\n\n<!-- end of the replaced -->)",
    re.DOTALL,
)


def filled(page: str) -> str:
    """Return the page with the table as the list has it."""
    rows = ["| what | why | undone |", "| --- | --- | --- |"]
    for patch in patches.EVERY:
        owner = patch.owner.rpartition(".")[2]
        name = f"`{owner}.{patch.name}`" if "." in patch.owner else f"{patch.owner}: {patch.name}"
        rows.append(f"| {name} | {patch.why} | {patch.stays or 'yes'} |")
    return TABLE.sub(lambda _: "\n".join(rows), page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
