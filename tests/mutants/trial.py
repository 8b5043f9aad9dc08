"""Mutants in a copy of the project, and what the tests that are to find them say."""

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutant import PACKAGE, ROOT, Mutant

COPIED = ("src", "tests", "examples", "docs", "benchmarks", "pyproject.toml", "README.md", "CHANGELOG.md", "Makefile")
SECONDS = 600
"""What the tests of one mutant may take."""


@dataclass(frozen=True)
class Verdict:
    """What came of a mutant.

    Attributes:
        found: a test has failed, and not because it could not run.
        by: the first of these.
        how: in which way it has failed, in a word or two.
        seconds: that the tests took.
    """

    found: bool
    by: str
    how: str
    seconds: float


class Copy:
    """A copy of the project, in which mutants are tried one after the other.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in COPIED:
            source, target = ROOT / name, folder / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "results"))
            else:
                shutil.copy(source, target)

    @contextmanager
    def with_mutant(self, mutant: Mutant) -> Iterator[None]:
        path = self._folder / PACKAGE / mutant.file
        text = path.read_text()
        try:
            self._write(path, mutant.source(self._folder))
            yield
        finally:
            self._write(path, text)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):  # valid for a second, by its date
            compiled.unlink()

    def run(self, tests: tuple[str, ...], simulated: bool) -> Verdict:
        """Run ``tests``, up to the first that fails: the cases that `make test` runs, then all."""
        verdict = self.run_cases(tests, simulated, "none")
        return verdict if verdict.by else self.run_cases(tests, simulated, "named")

    def run_cases(self, tests: tuple[str, ...], simulated: bool, extended: str) -> Verdict:
        """Run ``tests``, up to the first that fails, with ``extended`` cases or without."""
        report = self._folder / "report.xml"
        report.unlink(missing_ok=True)
        command = [
            sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--junitxml={report}",
            f"--extended={extended}", *(["--simulated"] if simulated else []), *(f"tests/{test}" for test in tests),
        ]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": str(self._folder / "src")}
        try:
            ran = subprocess.run(
                command, cwd=self._folder, env=environment, timeout=SECONDS, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            return Verdict(False, "", f"not within {SECONDS} s", SECONDS)
        if not report.exists():
            return Verdict(False, "", f"pytest ended with {ran.returncode}: {ran.stdout[-300:]}", 0.0)
        return verdict_of(report)


def verdict_of(report: Path) -> Verdict:
    """Return the verdict of pytest's report."""
    suite = ElementTree.parse(report).getroot()
    cases = list(suite.iter("testcase"))
    seconds = sum(float(case.get("time", 0)) for case in cases)
    for case in cases:
        if case.find("error") is not None:
            return Verdict(False, "", "a test could not be set up", seconds)
        failure = case.find("failure")
        if failure is not None:
            file = str(case.get("classname")).replace(".", "/").removeprefix("tests/")
            found, how = _how(f"{failure.get('message')}\n{failure.text}")
            return Verdict(found, f"{file}.py::{case.get('name')}", how, seconds)
    left_out = sum(case.find("skipped") is not None for case in cases)
    return Verdict(False, "", f"{len(cases) - left_out} tests passed, {left_out} were left out", seconds)


_WAYS = (  # in this order: what is written of a failure, and what that is
    (r"Timeout >|ModuleNotFoundError|SyntaxError|NameError|UnboundLocalError", ""),
    (r"'reuse|\breuse( at|:| of)|: reuse", "memory that is used again"),
    (r"RacesFound|'race|\brace( at|:| between)|: race", "race"),
    (r"StrictError", "NCCL's rules"),
    (r"RankError", "`RankError`"),
    (r"assert|did not raise|DID NOT RAISE", "result"),
)


def _how(text: str) -> tuple[bool, str]:
    for pattern, way in _WAYS:
        if re.search(pattern, text):
            return bool(way), way or "a test that could not run"
    return True, "error"
