"""Trains with programs of others, without DeepSpeed and on ZeroSync, and compares what they save.

python -m tests.ecosystem [ROW ...]    the rows, or all; their lines in docs/compatibility.md are made anew

Exits 1 if a program fails, if its weights differ, or if an environment cannot be made.
"""

import argparse
import datetime
import subprocess
import sys

from tests.ecosystem import runs, trainers
from tests.ecosystem.environment import FOLDER, ROOT, Environment, InstallError
from tests.matrix.table import Table

TRAINERS = Table(
    "<!-- trainers: made by `make trainers` -->",
    "<!-- end of the trainers -->",
    ["command", "releases", "moved", "stage 2", "stage 3", "date"],
    [":---", ":---", "---:", "---:", "---:", ":---"],
)
MATERIAL = ROOT / "tests" / "ecosystem" / "material.py"


def main() -> int:
    rows = {row.name: row for row in trainers.ROWS}
    parser = argparse.ArgumentParser(prog="python -m tests.ecosystem", description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(rows))
    parser.add_argument("--only", default="", metavar="WORD", help="programs with this word in their name")
    options = parser.parse_args()
    if unknown := [name for name in options.rows if name not in rows]:
        sys.exit(f"No row is called {unknown[0]!r}. There are: {', '.join(rows)}.")
    problems = 0
    for name in options.rows or rows:
        problems += run(rows[name], options.only)
    return min(problems, 1)


def run(row: trainers.Row, only: str) -> int:
    print(f"== {row.name}", flush=True)
    folder = FOLDER / row.name
    try:
        environment = Environment(row.name, row.packages, row.without)
    except InstallError as error:
        print(f"cannot be installed: {error}", flush=True)
        return 1
    versions = [f"{name} {found}" for name, found in zip(row.shown, environment.versions(row.shown), strict=True)]
    print(*versions, sep=", ", flush=True)
    material = folder / "material"
    subprocess.run([environment.python, str(MATERIAL), str(material)], env=environment.variables, check=True)
    problems = 0
    for program in row.programs:
        if only in program.name:
            outcome = runs.run(program, material, folder / "runs" / program.name.replace(" ", "-"), environment.variables)
            print(program.name, *outcome.cells, sep=" | ", flush=True)
            cells = [f"`{program.name}`", ", ".join(versions), *outcome.cells, datetime.date.today().isoformat()]
            TRAINERS.update({cells[0]: cells[1:]}, [f"`{p.name}`" for r in trainers.ROWS for p in r.programs])
            problems += outcome.problems
    return problems


if __name__ == "__main__":
    sys.exit(main())
