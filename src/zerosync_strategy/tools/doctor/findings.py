"""What the doctor finds: each finding with its level and its remedy."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any


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
        level: how bad it is.
        found: what was found, in a sentence.
        remedy: what to do about it; empty where there is nothing to do.
    """

    topic: str
    level: Level
    found: str
    remedy: str = ""


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
        findings: list[dict[str, Any]] = [
            {**dataclasses.asdict(finding), "level": finding.level.value} for finding in self.findings
        ]
        return json.dumps({"exit_status": self.exit_status, "findings": findings}, indent=1)


def ok(topic: str, found: str) -> Finding:
    """Return that all is well."""
    return Finding(topic, Level.OK, found)


def note(topic: str, found: str, remedy: str = "") -> Finding:
    """Return what to know."""
    return Finding(topic, Level.NOTE, found, remedy)


def warning(topic: str, found: str, remedy: str) -> Finding:
    """Return what may go wrong."""
    return Finding(topic, Level.WARNING, found, remedy)


def error(topic: str, found: str, remedy: str) -> Finding:
    """Return what does not work."""
    return Finding(topic, Level.ERROR, found, remedy)


def or_ok(found: Iterable[Finding], topic: str, otherwise: str) -> list[Finding]:
    """Return ``found``, or where there is nothing, that all is well, in the words of ``otherwise``."""
    return list(found) or [ok(topic, otherwise)]
