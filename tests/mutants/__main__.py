"""Tries mutants of the package: each must be found by a test.

python -m tests.mutants            all
python -m tests.mutants WORD ...   those with one of the words in their rule or in what they switch off

Their rows in the tables of docs/mutants.md are made anew.

Exits 1 if a mutant is not found, or if the tests of one fail without it.
"""

import argparse
import datetime
import queue
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants import TABLES, table
from tests.mutants.mutant import Mutant
from tests.mutants.trial import Copy, Verdict


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="of the mutants to try")
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time (2)")
    parser.add_argument("--unchanged", action="store_true", help="run the tests without mutants alone")
    options = parser.parse_args()

    rows = [mutant for mutants in TABLES.values() for mutant in mutants]
    if options.words:
        rows = [row for row in rows if any(word.lower() in f"{row.rule} {row.what}".lower() for word in options.words)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        verdicts = {} if options.unchanged else try_all(rows, Path(folder), options.workers)
        if verdicts:
            table.write(TABLES, verdicts, datetime.date.today())
        red = [] if options.words and not options.unchanged else fail_unchanged(rows, Path(folder) / "unchanged")
    survivors = [row for row, verdict in verdicts.items() if not verdict.found]
    for row in survivors:
        print(f"NOT FOUND: {row.rule}, {row.what}: {verdicts[row].how}")
    for line in red:
        print(f"FAILS WITHOUT A MUTANT: {line}")
    print(f"{len(verdicts) - len(survivors)} of {len(verdicts)} mutants were found")
    return int(bool(survivors or red))


def try_all(rows: list[Mutant], folder: Path, workers: int) -> dict[Mutant, Verdict]:
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for number in range(workers):
        (place := folder / str(number)).mkdir()
        copies.put(Copy(place))

    def verdict(row: Mutant) -> Verdict:
        copy = copies.get()
        try:
            with copy.with_mutant(row):
                found = copy.run(row.tests, row.simulated)
        finally:
            copies.put(copy)
        print(f"{row.rule:4} {row.what}: {found.how} {found.by} {found.seconds:.0f} s", flush=True)
        return found

    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(rows, pool.map(verdict, rows), strict=True))


def fail_unchanged(rows: list[Mutant], folder: Path) -> list[str]:
    """The first test that fails without a mutant, of those on the simulated device and of the others."""
    folder.mkdir()
    copy, red = Copy(folder), []
    for simulated in (False, True):
        tests = tuple(sorted({test for row in rows if row.simulated is simulated for test in row.tests}))
        if tests and (verdict := copy.run_cases(tests, simulated, "named")).by:
            red.append(f"{verdict.by}: {verdict.how}")
    return red


if __name__ == "__main__":
    sys.exit(main())
