"""Removed options, and removed values of options. For one release, their use raises an error with the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SINCE = "0.4.0"
"""The first release without these. The next major or minor release empties the table."""
REMOVED = {  # each with the remedy
    "overlap_gather": "Leave it out: a step gathers what it has updated while it goes on with the rest.",
    "step_cost": "Leave it out: owners are balanced by what Newton-Schulz costs, the rest by elements.",
    "unshard_streams='shared'": "Leave it out: gathers of different process groups wait for each other no more.",
}


def refuse_removed(options: Mapping[Any, Any]) -> None:
    """Raise a ``ValueError`` with the remedy if one of ``options``, or its value, was removed."""
    for name, value in options.items():
        for said in (name, f"{name}={value!r}" if isinstance(value, str) else name):
            if said in REMOVED:
                raise ValueError(f"ZeroSync option {said!r} was removed in {SINCE}. {REMOVED[said]}")
