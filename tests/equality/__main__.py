"""Compares what is trained and sent by the package of a revision with what is by that of the working tree.

python -m tests.equality --base main

Runs the training programs of `programs.py`, those of the working tree, with either package. What every rank and
optimizer step did must be the same: backwards and reductions, the bytes sent, collectives by kind, as the report has
them and as process groups see them, their order, peaks of memory, norms, and the bits of losses and final parameters.
Prints each difference and exits 1, or prints `equal` and exits 0. `floor_bytes` and `seconds` are not compared.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.equality.recorder import END, ERROR, Results

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.equality", description=__doc__.partition("\n")[0])
    parser.add_argument("--base", default="HEAD", help="the revision to compare the working tree with (HEAD)")
    parser.add_argument("--only", default="", metavar="TEXT", help="run the programs whose names contain this")
    options = parser.parse_args()

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="equality-") as folder:
        unpack(options.base, Path(folder))
        before = measured(Path(folder) / "src", options.only)
    after = measured(ROOT / "src", options.only)
    if not after:
        sys.exit(f"No program has {options.only!r} in its name.")
    found = list(differences(before, after))
    print(table(after), *(found or ["equal"]), sep="\n")
    print(f"{len(after)} programs with {options.base} and the working tree, {time.monotonic() - began:.0f} s")
    return 1 if found else 0


def unpack(revision: str, folder: Path) -> None:
    """Put `src` of a revision into a folder."""
    archive = subprocess.run(["git", "archive", revision, "src"], cwd=ROOT, stdout=subprocess.PIPE)
    if archive.returncode:
        sys.exit(f"{revision!r} is no revision with a folder src.")
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)


def measured(source: Path, only: str) -> Results:
    """What the programs do with the package in `source`, in a process of its own."""
    environment = {
        "PYTHONPATH": os.pathsep.join([str(source), str(ROOT)]), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    with tempfile.NamedTemporaryFile(prefix="equality-", suffix=".json") as output:
        command = [sys.executable, "-m", "tests.equality.recorder", str(source), only, output.name]
        if subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}).returncode:
            sys.exit(f"The programs do not run with the package in {source}.")
        return json.load(output)


def differences(before: Results, after: Results) -> Iterator[str]:
    """A line for each value that differs, and for each program that failed."""
    for program in after:
        for rank, rows in enumerate(zip(before[program], after[program], strict=True)):
            old, new = ({(step, what): value for step, what, value in values} for values in rows)
            for step, what in {**old, **new}:
                values = old.get((step, what), "-"), new.get((step, what), "-")
                if values[0] != values[1] or what == ERROR:
                    at = "at the end" if step == END else f"step {step}"
                    yield f"{program}: rank {rank}, {at}, {what}: {values[0]} before, {values[1]} after"


def table(results: Results) -> str:
    """What was run, with the bytes that rank 0 sent."""
    lines = [f"{'program':40} {'ranks':>5} {'steps':>5} {'sent':>9} {'values':>6}"]
    for program, ranks in results.items():
        sent = [int(value) for _, what, value in ranks[0] if what.endswith("bytes_sent")]
        lines.append(f"{program:40} {len(ranks):5} {len(sent):5} {sum(sent):9} {sum(map(len, ranks)):6}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
