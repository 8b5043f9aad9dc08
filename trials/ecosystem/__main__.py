"""Trains with programs of others, without DeepSpeed and on ZeroSync, and compares their weights.

python -m trials.ecosystem trainers [ROW ...]    commands of trainers; docs/compatibility.md has their lines
python -m trials.ecosystem projects [ROW ...]    Lightning projects, likewise

Without rows it runs all. Exits 1 if a program fails, if its weights differ, or if an environment cannot be made.
"""

import argparse
import datetime
import json
import re
import subprocess
import sys
from collections.abc import Sequence

from trials.ecosystem import runs, trainers
from trials.ecosystem.environment import FOLDER, ROOT, Environment, InstallError
from trials.ecosystem.projects import rows as projects
from trials.ecosystem.runs import STAGES, Outcome
from trials.matrix.table import Table

_MEASURED = ["moved", *(f"stage {stage}" for stage in STAGES), "sent"]
_ALIGNED = [":---", ":---", *["---:"] * len(_MEASURED), ":---"]
TRAINERS = Table(
    "<!-- trainers: made by `make trainers` -->",
    "<!-- end of the trainers -->",
    ["command", "releases", *_MEASURED, "date"],
    _ALIGNED,
)
PROJECTS = Table(
    "<!-- projects: made by `make projects` -->",
    "<!-- end of the projects -->",
    ["project", "releases", *_MEASURED, "date"],
    _ALIGNED,
)
MATERIAL = ROOT / "trials" / "ecosystem"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trials.ecosystem", description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=["trainers", "projects"])
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--only", default="", metavar="PATTERN", help="of the trainers, commands like this")
    again = "of the trainers, run this stage alone; of the others, what was saved last is compared"
    parser.add_argument("--again", type=int, choices=STAGES, help=again)
    options = parser.parse_args()
    kind = trainers if options.kind == "trainers" else projects
    by_name = {row.name: row for row in kind.ROWS}
    if unknown := [name for name in options.rows if name not in by_name]:
        sys.exit(f"No row is called {unknown[0]!r}. There are: {', '.join(by_name)}.")
    problems = 0
    for name in options.rows or by_name:
        row = by_name[name]
        print(f"== {name}", flush=True)
        try:
            problems += run_trainer(row, options) if isinstance(row, trainers.Row) else run_project(row)
        except InstallError as error:
            print(f"cannot be installed: {error}", flush=True)
            problems += 1
    return min(problems, 1)


def run_trainer(row: trainers.Row, options: argparse.Namespace) -> int:
    environment = Environment(row.name, row.packages, row.without, row.repository)
    releases = said(environment, row.shown)
    material = FOLDER / row.name / "material"
    make = [environment.python, str(MATERIAL / row.material), str(material)]
    subprocess.run(make, env=environment.variables, check=True)
    order = [f"`{program.name}`" for each in trainers.ROWS for program in each.programs]
    problems = 0
    for program in row.programs:
        if re.search(options.only, program.name):
            folder = FOLDER / row.name / "runs" / program.name.replace(" ", "-")
            stages = (0, *STAGES) if options.again is None else (options.again,)
            outcome = runs.run(program, material, folder, environment.variables, stages)
            problems += write(TRAINERS, f"`{program.name}`", releases, outcome, order)
    return problems


def run_project(row: projects.Project) -> int:
    environment = Environment(f"projects/{row.name}", row.packages, row.without)
    releases = said(environment, (row.packages[0].partition("==")[0],))
    log = environment.folder / "log.txt"
    variables = {**environment.variables, **runs.quiet(environment.folder), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    with log.open("w") as file:
        command = [environment.python, "-m", "trials.ecosystem.fit", row.module]
        subprocess.run(command, cwd=environment.folder, env=variables, stdout=file, stderr=subprocess.STDOUT)
    print(f"  log in {log}", flush=True)
    lines = log.read_text().splitlines()
    try:
        found = json.loads(lines[-1])
    except (IndexError, ValueError):
        found = {"plain": runs.last_error(log.read_text())}
    stages = {stage: found.get(str(stage), f"does not run without DeepSpeed: {found['plain']}") for stage in STAGES}
    moved = found["plain"] if isinstance(found["plain"], float) else float("nan")
    outcome = Outcome(moved, stages, found.get("sent", ()))
    return write(PROJECTS, row.name, releases, outcome, [each.name for each in projects.ROWS])


def said(environment: Environment, packages: Sequence[str]) -> str:
    """The releases of these packages."""
    versions = zip(packages, environment.versions(packages), strict=True)
    return ", ".join(f"{name} {found}" for name, found in versions)


def write(table: Table, name: str, releases: str, outcome: Outcome, order: list[str]) -> int:
    print(name, releases, *outcome.cells, sep=" | ", flush=True)
    table.update({name: [releases, *outcome.cells, datetime.date.today().isoformat()]}, order)  # at once
    return int(outcome.problems)


if __name__ == "__main__":
    sys.exit(main())
