"""Runs the tests with several releases of what the package depends on, one environment at a time on disk.

python -m trials.matrix [ROW ...]     the rows, or all; their lines in docs/compatibility.md are made anew
python -m trials.matrix --smoke       a few minutes of the oldest row, as CI runs them; no table
python -m trials.matrix --canary      the newest of everything: what is newer than the tested, and whether it works

Exits 1 if a test fails or an environment cannot be made.
"""

import argparse
import datetime
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from trials.matrix.environment import PACKAGES, ROOT, Environment, InstallError
from trials.matrix.rows import ALL, ROWS, SMOKE, Row
from trials.matrix.table import MATRIX

FOLDER = ROOT / ".matrix" / "row"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trials.matrix", description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(row.name for row in ROWS))
    parser.add_argument("--smoke", action="store_true", help="a part of the oldest row")
    parser.add_argument("--canary", action="store_true", help="the newest release of everything")
    parser.add_argument("--workers", default="2", help="tests at a time (2)")
    options = parser.parse_args()

    by_name = {row.name: row for row in ROWS}
    if unknown := [name for name in options.rows if name not in by_name]:
        sys.exit(f"No row is called {unknown[0]!r}. There are: {', '.join(by_name)}.")
    if options.smoke:
        return run(by_name["oldest"], SMOKE, options.workers).problems
    if options.canary:
        return canary(options.workers)
    problems = 0
    for row in [by_name[name] for name in options.rows] or ROWS:
        result = run(row, row.tests, options.workers)
        problems += result.problems
        MATRIX.update({row.name: result.cells}, list(by_name))  # at once: the whole takes hours
    return min(problems, 1)


def canary(workers: str) -> int:
    """Run the newest release of everything, and say which are others than in constraints.txt."""
    result = run(Row("newest", fresh=True), tuple(ALL), workers)
    print("others than in constraints.txt:", *(changes(result.cells[1:]) or ["none"]), sep="\n  ")
    return result.problems


def changes(versions: list[str]) -> list[str]:
    """Where `versions`, in the order of PACKAGES, differ from those that constraints.txt has for the newest Python."""
    pins = re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned = dict(reversed(pins))  # of several lines of a package, the first is that of the newest Python
    pairs = zip(PACKAGES, versions, strict=False)
    return [f"{package} {pinned[package]} -> {found}" for package, found in pairs if found != pinned[package]]


class Result:
    """The cells of one row after its name, and whether something failed: 0 or 1."""

    def __init__(self, versions: list[str], counts: list[int] | None) -> None:
        outcome = ["not run"] * 3 if counts is None else [str(count) for count in counts]
        self.cells = [*versions, *outcome, datetime.date.today().isoformat()]
        self.problems = int(counts is None or counts[0] == 0 or counts[1] > 0)


def run(row: Row, tests: tuple[str, ...], workers: str) -> Result:
    print(f"== {row.name}", flush=True)
    try:
        environment = Environment(row, FOLDER)
    except InstallError as error:
        print(f"cannot be installed: {error}", flush=True)
        return Result([row.python, *(row.pins.get(package, "") for package in PACKAGES)], None)
    try:
        versions = environment.versions()
        print(*map(" ".join, zip(["python", *PACKAGES], versions, strict=True)), sep=", ", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [environment.python, "-m", "pytest", "-q", "-n", workers, f"--junitxml={report}", *tests]
            subprocess.run(command, cwd=ROOT, env=environment.variables)
            return Result(versions, counts_in(report) if report.exists() else None)
    finally:
        environment.remove()


def counts_in(report: Path) -> list[int]:
    """How many tests passed, failed and were skipped, by pytest's report."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, errors, failures, skipped = (
        sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "errors", "failures", "skipped")
    )
    return [total - errors - failures - skipped, errors + failures, skipped]


if __name__ == "__main__":
    sys.exit(main())
