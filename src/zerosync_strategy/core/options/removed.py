"""Removed options. For one release, their use raises an error with the remedy."""

from __future__ import annotations

from collections.abc import Iterable

SINCE = "0.4.0"
"""The first release without these options. The next major or minor release empties the table."""
REMOVED = {  # each with the remedy
    "overlap_gather": "Leave it out: a step gathers what it has updated while it goes on with the rest.",
    "step_cost": "Leave it out: owners are balanced by what Newton-Schulz costs, the rest by elements.",
}


def refuse_removed(names: Iterable[object]) -> None:
    """Raise a ``ValueError`` with the remedy if one of ``names`` was removed."""
    for name in names:
        if name in REMOVED:
            raise ValueError(f"ZeroSync option {name!r} was removed in {SINCE}. {REMOVED[str(name)]}")
