"""By which target of the Makefile a test runs."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence

import pytest

from tests.mutants.mutant import ROOT

TARGETS = ("make test", "make gpu-sim-part", "make test-all", "make gpu-sim")
"""The first two are what CI runs; each of the others runs all of one of them, and more."""

_LEFT_OUT = "left out: "


def targets_of(tests: Iterable[tuple[str, bool]]) -> dict[tuple[str, bool], str]:
    """Return the target of each of ``tests``: node ids below tests, and whether they run on the simulated device.

    Raises:
        ValueError: one of them is not there.
    """
    tests, targets = set(tests), {}
    runs, others = _collected(sorted({f"tests/{test.partition('::')[0]}" for test, _ in tests}))
    part = _simulated_part()
    for test, simulated in tests:
        node_id = f"tests/{test}"
        if node_id not in runs | others:
            raise ValueError(f"{test} is not there")
        if simulated:
            file, function = node_id.partition("::")[0], node_id.partition("[")[0]
            short = not part.isdisjoint((node_id, function)) or (file in part and node_id in runs)
        else:
            short = node_id in runs
        targets[test, simulated] = TARGETS[simulated + (0 if short else 2)]
    return targets


def _collected(files: Sequence[str]) -> tuple[set[str], set[str]]:
    """Return the node ids in ``files`` that `make test` runs, and those that it leaves out."""
    command = [sys.executable, "-m", "pytest", "-p", __name__, "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, text=True) as collection:
        said, _ = collection.communicate()
    if collection.returncode:
        raise ValueError(f"pytest cannot collect {', '.join(files)}: {said[-2000:]}")
    lines = [line for line in said.splitlines() if "::" in line]
    others = {line.removeprefix(_LEFT_OUT) for line in lines if line.startswith(_LEFT_OUT)}
    return set(lines), others


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """The one hook of this module as a plugin of pytest."""
    for item in items:
        print(f"{_LEFT_OUT}{item.nodeid}")


def _simulated_part() -> set[str]:
    """What `make gpu-sim-part` runs, by the Makefile."""
    database = subprocess.run(["make", "-qp", "help"], cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
    found = re.search(r"^SIMULATED_PART := (.*)$", database, re.MULTILINE)
    if found is None:
        raise ValueError("the Makefile has no SIMULATED_PART")
    return set(shlex.split(found[1]))
