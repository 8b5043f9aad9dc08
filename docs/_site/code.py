"""Copies the programs of docs/code, and the examples, into the pages that show them: python docs/_site/code.py

A page says ``<!-- code: FILE -->`` or ``<!-- code: FILE SECTION -->`` on the line before the code block. The site fails
where the two differ. A section of a file stands between ``# --8<-- [start:NAME]`` and ``# --8<-- [end:NAME]``.
"""

import re
from pathlib import Path
from textwrap import dedent, indent

DOCS = Path(__file__).parent.parent
BLOCK = re.compile(r"^( *)<!-- code: (\S+)(?: (\S+))? -->\n( *```\w+\n)(.*?)( *```)$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"^ *# --8<-- \[.*\]\n", re.MULTILINE)


def filled(page: str) -> str:
    """Return the page with the code as it is in its files."""
    return BLOCK.sub(lambda m: f"{m[0][: m.start(5) - m.start()]}{indent(code(m[2], m[3]), m[1])}{m[6]}", page)


def code(file: str, section: str | None) -> str:
    """Return the text of a file, or of a section of it."""
    text = (DOCS.parent / file).read_text()
    if section is not None:
        marks = re.search(rf"\[start:{section}\]\n(.*?)\n *# --8<-- \[end:{section}\]", text, re.DOTALL)
        if marks is None:
            raise ValueError(f"{file} has no section {section}")
        text = dedent(marks[1]).strip("\n") + "\n"
        text = re.sub(r"\n\n(?=def )", "\n\n\n", text)  # as ruff formats what were methods
    return MARK.sub("", text)


if __name__ == "__main__":
    for path in sorted(DOCS.glob("*.md")):
        path.write_text(filled(path.read_text()))
