"""Mutants: the package with a wait, a lifetime or another promise switched off, and the test that finds it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.mutants.mutant import Mutant, read

TABLES: Mapping[str, Sequence[Mutant]] = {
    heading: tuple(read(Path(__file__).with_name(name)))
    for heading, name in (
        ("Waits, events and lifetimes", "waits.txt"),
        ("What was wrong once, put back", "findings.txt"),
        ("Other promises", "rules.txt"),
    )
}
"""By the heading of their table."""
