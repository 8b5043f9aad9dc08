"""What the doctor finds: each finding with its level and its remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial


class Severity(str, Enum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"  # right, but perhaps not what is expected
    WARNING = "warning"  # may go wrong, or has not been tested
    ERROR = "error"  # does not work, or trains something else than plain torch


@dataclass(frozen=True)
class Finding:
    """What was examined (``topic``, the same on every machine), what was found, in a sentence, and the remedy."""

    topic: str
    level: Severity
    found: str
    remedy: str = ""


def of_topic(topic: str) -> Iterator[Callable[..., Finding]]:
    """Return, for each level, a function that makes a finding of ``topic`` from the text and its remedy."""
    return (partial(Finding, topic, level) for level in Severity)
