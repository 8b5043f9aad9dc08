"""Which tests reach nothing that others do not: for the mark ``extended``, which keeps `make test` short.

``python -m trials.cover [options of pytest]`` runs the tests under coverage.py (which must be installed: ``pip install
coverage``), in their ranks, too, and takes longer than they do. It looks for the cheapest tests that reach
every line and branch of the package that all of them reach, with those that find a mutant, and prints the others, the
costliest first. Such a test may still hold what no other does: a value, an order, a combination.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import resource
import subprocess
import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.mutants import table

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "zerosync_strategy"
FOLDER = "ZEROSYNC_COVER"  # in the environment: where the processes of the tests leave what they have reached
CHEAP = 0.4  # seconds of processor time, below which a test is not worth a mark


@dataclass
class Reached:
    """What a test reaches (file, and a line with the one before it), and what it costs in seconds of processor time."""

    arcs: set[tuple[str, tuple[int, int]]] = field(default_factory=set)
    seconds: float = 0.0


class Recorder:
    """A plugin of pytest. A forked rank records on, and writes at its end; one that is killed leaves nothing."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        import coverage

        leave, before = os._exit, _processor_seconds()
        recorded: Any = coverage.Coverage(data_file=None, branch=True, source=[str(SOURCE)], config_file=False)
        recorded.set_option("run:disable_warnings", ["no-data-collected"])  # of this process, where ranks do all

        def write(seconds: float) -> None:
            recorded.stop()
            data = recorded.get_data()
            arcs = {(name, arc) for name in data.measured_files() for arc in data.arcs(name)}
            with tempfile.NamedTemporaryFile(dir=os.environ[FOLDER], delete=False) as file:
                pickle.dump((item.nodeid, seconds, arcs), file)

        def write_and_leave(status: int) -> None:
            try:
                write(0.0)
            finally:
                leave(status)

        os._exit = write_and_leave  # type: ignore[assignment]
        recorded.start()
        try:
            return (yield)
        finally:
            os._exit = leave
            write(_processor_seconds() - before)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Recorder())


def _processor_seconds() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def read(folder: Path) -> dict[str, Reached]:
    """What each test of a run has reached, with its ranks."""
    found: dict[str, Reached] = {}
    for file in folder.iterdir():
        test, seconds, arcs = pickle.loads(file.read_bytes())
        reached = found.setdefault(test, Reached())
        reached.arcs |= arcs
        reached.seconds += seconds
    return found


def needless(found: dict[str, Reached], kept: set[str]) -> list[str]:
    """The tests that reach nothing beside `kept` and the cheapest of the others, the costliest first."""
    left = set().union(*(each.arcs for each in found.values())) - set().union(*(found[test].arcs for test in kept))
    others = {test: found[test].arcs & left for test in found.keys() - kept}
    while left:
        best = max(others, key=lambda test: len(others[test]) / max(found[test].seconds, 1e-3))
        left -= others.pop(best)
        others = {test: arcs & left for test, arcs in others.items()}
    return sorted(others, key=lambda test: -found[test].seconds)


def main() -> int:
    if importlib.util.find_spec("coverage") is None:
        sys.exit("trials.cover needs coverage.py: pip install coverage")
    by = [table.as_test(by) for _, by in table.rows_of((ROOT / "docs" / "mutants.md").read_text()).values()]
    finders = {f"tests/{test[0]}" for test in by if test is not None and not test[1]}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-p", "trials.cover", *sys.argv[1:]]
        status = subprocess.call(command, cwd=ROOT, env=os.environ | {FOLDER: folder})
        found = read(Path(folder))
    kept = {test for test, each in found.items() if each.seconds < CHEAP or test in finders or not each.arcs}
    rest = needless(found, kept)
    for test in rest:
        print(f"{found[test].seconds:6.1f} s  {test}")
    total, of_rest = (sum(found[test].seconds for test in tests) for tests in (found, rest))
    print(f"{len(rest)} of {len(found)} tests, {of_rest:.0f} of {total:.0f} s, reach nothing that others do not")
    return status


if __name__ == "__main__":
    sys.exit(main())
