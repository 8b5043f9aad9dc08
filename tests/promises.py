"""Which test holds which rule: the table at the end of docs/rules.md.

python -m tests.promises            writes it

A test holds a rule if its docstring, or that of its file, names the rule, or if it is to find a mutant of the rule.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.mutants import TABLES

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "rules.md"
PAGES = (PAGE, ROOT / "docs" / "streams.md")
MOST = 3
"""Tests of a rule that the table has, of those that name it and of those that find its mutants."""
BEGIN, END = "<!-- promises: made by `python -m tests.promises` -->\n\n", "<!-- end of the promises -->"

_RULE = re.compile(r"^- \*\*([A-Z]\d)\*\* (.*?)(?=^- |^#|\n\n(?! ))", re.MULTILINE | re.DOTALL)
_SENTENCE = re.compile(r"[.:;](?=\s|$)")
_NAME = re.compile(r"\b[A-Z]\d\b")


def rules() -> dict[str, str]:
    """Return the rules, each with the beginning of what it says; not those that are gone."""
    found = {}
    for page in PAGES:
        for name, text in _RULE.findall(page.read_text()):
            text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(text.split()))
            if not text.endswith("is gone."):
                found[name] = _SENTENCE.split(text, maxsplit=1)[0].replace("|", r"\|")
    return dict(sorted(found.items()))


def named() -> Iterator[tuple[str, str]]:
    """Yield each rule that a docstring names, with the test: a file, or file::function."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        file = str(path.relative_to(ROOT / "tests"))
        module = ast.parse(path.read_text())
        for rule in sorted(set(_NAME.findall(ast.get_docstring(module) or ""))):
            yield rule, file
        for node in module.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for rule in sorted(set(_NAME.findall(ast.get_docstring(node) or ""))):
                    yield rule, f"{file}::{node.name}"


def finding() -> dict[str, Counter[str]]:
    """Return by rule the tests that are to find its mutants, each with how many."""
    found: dict[str, Counter[str]] = {}
    for mutants in TABLES.values():
        for mutant in mutants:
            tests = {test.partition("[")[0] for test in mutant.tests}
            found.setdefault(mutant.rule, Counter()).update(sorted(tests))
    return found


def tests_of() -> dict[str, list[str]]:
    """Return by rule the tests of the table."""
    by_docstring: dict[str, list[str]] = {rule: [] for rule in rules()}
    for rule, test in named():
        if rule in by_docstring:
            by_docstring[rule].append(test)
    by_mutant: Mapping[str, Counter[str]] = finding()
    return {
        rule: list(dict.fromkeys([
            *sorted(tests, key=_place)[:MOST],
            *(test for test, _ in by_mutant.get(rule, Counter()).most_common(MOST)),
        ]))
        for rule, tests in by_docstring.items()
    }  # fmt: skip


def _place(test: str) -> int:
    """Tests of core come first, and those that need a GPU last."""
    return 2 if test.startswith("gpu/") else not test.startswith(("core/", "racecheck/"))


def filled(page: str) -> str:
    """Return the page with the table as rules, tests and mutants are."""
    said, mutants = rules(), finding()
    rows = ["| rule | what it says, in short | tests that hold it | mutants |", "|---|---|---|---:|"]
    for rule, tests in tests_of().items():
        cell = "<br>".join(f"`{test}`" for test in tests)
        count = sum(mutant.rule == rule for of in TABLES.values() for mutant in of) if rule in mutants else ""
        rows.append(f"| {rule} | {said[rule]} | {cell} | {count} |")
    begin, mark, rest = page.partition(BEGIN)
    if not mark or END not in rest:
        raise ValueError("the page has no place for the table")
    return f"{begin}{BEGIN}{chr(10).join(rows)}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
