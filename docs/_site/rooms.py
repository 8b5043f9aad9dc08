"""Writes the rooms of the package into CONTRIBUTING.md, and its files into docs/map.md: python docs/_site/rooms.py

What each holds is the first sentence of its docstring. Standard library only.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "zerosync_strategy"
PAGES = {"rooms": ROOT / "CONTRIBUTING.md", "files": ROOT / "docs" / "map.md"}
"""By the name of the table, the page that has it."""
TESTS = {
    "accelerate": ("accelerate/",),
    "core": ("core/",),
    "core/attached": ("core/test_attach.py", "core/test_layers.py", "core/test_detach.py", "core/test_auto_budgets.py"),
    "core/checkpoints": ("core/test_checkpoints.py", "core/test_other_ranks.py"),
    "core/comm": ("core/test_nodes.py", "core/test_in_flight.py", "racecheck/"),
    "core/engine": ("core/test_releases.py", "core/test_parameter.py", "test_boundary.py", "test_contracts.py"),
    "core/failures": ("core/test_failures.py", "core/test_disagreement.py", "core/test_hangs.py", "faults/"),
    "core/gradients": ("core/test_window.py", "core/test_reduction.py", "core/test_stripes.py"),
    "core/optimizer": ("core/test_stepping.py", "core/test_optimizers.py", "core/test_whole.py"),
    "core/params": ("core/test_units.py", "core/test_values.py", "core/test_unshard.py", "core/test_gathers.py"),
    "fabric": ("fabric/",),
    "hook": ("hook/",),
    "hook/site": ("hook/test_loaded.py",),
    "lightning": ("lightning/",),
    "lightning_fabric": ("lightning/test_other_package.py",),
    "pytorch_lightning": ("lightning/test_other_package.py",),
    "tools": ("hook/test_command.py",),
    "tools/doctor": ("doctor/",),
    "tools/plan": ("planning/",),
}
"""By room, the tests to begin with, below tests/."""


def sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    text = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    text = re.split(r"(?<=\.)\s+(?=[A-Z`])", " ".join(text.split()), maxsplit=1)[0].rstrip(".:")
    return re.sub(r":\w+:`~?[\w.]*?(\w+)`", r"`\1`", text).replace("``", "`").replace("|", r"\|")


def rooms() -> Iterator[Path]:
    """Yield the folders of the package, a folder before those in it."""
    for path in sorted(SOURCE.rglob("__init__.py")):
        if path.parent != SOURCE:
            yield path.parent


def tables() -> dict[str, str]:
    """Return the tables by name."""
    short, full = (
        ["| room | what it is | tests to begin with |", "|---|---|---|"],
        ["| file | what it holds |", "|---|---|"],
    )
    for room in [SOURCE, *rooms()]:
        name = "" if room == SOURCE else f"{room.relative_to(SOURCE)}/"
        row = f"| {{}}`{name}`{{}} | {sentence(room / '__init__.py')} |"
        if name:
            tests = ", ".join(f"`{test}`" for test in TESTS[name.rstrip("/")])
            short.append(f"{row.format('', '')} {tests} |")
            full.append(row.format("**", "**"))
        for path in sorted(room.glob("*.py")):
            if path.name != "__init__.py":
                full.append(f"| `{name}{path.name}` | {sentence(path)} |")
    return {"rooms": "\n".join(short), "files": "\n".join(full)}


def filled(name: str, page: str) -> str:
    """Return the page with its table as the package has it."""
    begin, mark, rest = page.partition(f"<!-- {name}: made by `python docs/_site/rooms.py` -->\n\n")
    _, end, after = rest.partition(f"<!-- end of the {name} -->")
    if not (mark and end):
        raise ValueError(f"the page has no place for the table of {name}")
    return f"{begin}{mark}{tables()[name]}\n\n{end}{after}"


if __name__ == "__main__":
    for name, page in PAGES.items():
        page.write_text(filled(name, page.read_text()))
