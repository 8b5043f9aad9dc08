"""What the doctor finds: each finding with its level and its remedy."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Level(str, Enum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"  # right, but perhaps not what is expected
    WARNING = "warning"  # may go wrong, or has not been tested
    ERROR = "error"  # does not work, or trains something else than plain torch


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: what was looked at, the same on every machine: ``"versions"``, ``"contract"``, ...
        found: what was found, in a sentence.
        remedy: what to do about it; empty where there is nothing to do.
    """

    topic: str
    level: Level
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Topic:
    """What the findings of one part of an examination have in common."""

    name: str

    def ok(self, found: str) -> Finding:
        return Finding(self.name, Level.OK, found)

    def note(self, found: str, remedy: str = "") -> Finding:
        return Finding(self.name, Level.NOTE, found, remedy)

    def warning(self, found: str, remedy: str) -> Finding:
        return Finding(self.name, Level.WARNING, found, remedy)

    def error(self, found: str, remedy: str) -> Finding:
        return Finding(self.name, Level.ERROR, found, remedy)

    def or_ok(self, found: Iterable[Finding], otherwise: str) -> list[Finding]:
        """Return ``found``, or where there is nothing, that all is well, in the words of ``otherwise``."""
        return list(found) or [self.ok(otherwise)]


@dataclass(frozen=True)
class Examination:
    """All findings of one examination, in the order in which they were made."""

    findings: tuple[Finding, ...]
    strict: bool = False

    @property
    def exit_status(self) -> int:
        """1 where there is an error, or with ``strict`` a warning; else 0."""
        bad = (Level.ERROR, Level.WARNING) if self.strict else (Level.ERROR,)
        return int(any(finding.level in bad for finding in self.findings))

    def to_json(self) -> str:
        """Return a JSON object with ``exit_status`` and ``findings``, whose fields are those of :class:`Finding`."""
        return json.dumps(
            {"exit_status": self.exit_status, "findings": [dataclasses.asdict(each) for each in self.findings]},
            indent=1,
        )
