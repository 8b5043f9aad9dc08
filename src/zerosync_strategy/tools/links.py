"""The speed of what connects ranks: what a plan assumes and the doctor measures."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_PREFIX = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Links:
    """Two kinds of link, between ranks of one node and between nodes.

    Attributes:
        within: bytes per second that one rank sends to ranks of its node, while it receives as many.
        between: bytes per second that one node sends to others, all its ranks together, while it receives as many.
        latency_within, latency_between: seconds from the start of a small message to its arrival.
    """

    within: float = 300e9
    between: float = 50e9
    latency_within: float = 5e-6
    latency_between: float = 20e-6


def parse_speed(option: str, value: str) -> float:
    """Return bytes per second from a text such as ``"400Gbit/s"`` or ``"300GB/s"``; else raise a ``ValueError``."""
    match = _match(r"([KMGT]?)(bit|B)/s", option, "a speed such as '400Gbit/s' or '300GB/s'", value)
    return float(match[1]) * _PREFIX[match[2]] / (8 if match[3] == "bit" else 1)


def parse_latency(option: str, value: str) -> float:
    """Return seconds from a text such as ``"20us"`` or ``"0.1ms"``; else raise a ``ValueError``."""
    match = _match(r"(s|ms|us)", option, "a time such as '20us' or '0.1ms'", value)
    return float(match[1]) * _SECONDS[match[2]]


def _match(unit: str, option: str, what: str, value: str) -> re.Match[str]:
    """Return a match of a positive number, its first group, and a ``unit``."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*{unit}", value.strip())
    if match is None or not float(match[1]):
        raise ValueError(f"{option} takes {what}, got {value!r}.")
    return match


def save(file: Path, slow: Mapping[str, float], fast: Mapping[str, float]) -> None:
    """Write the fields of :class:`Links` that were measured, at their slow and their fast quartile."""
    file.write_text(json.dumps({"slow": slow, "fast": fast}, indent=1) + "\n")


def read(file: Path, assumed: Links) -> tuple[Links, Links]:
    """Return what :func:`save` wrote, the slow and the fast; what was not measured is as ``assumed``.

    Raises:
        ValueError: the file is no such file.
    """
    try:
        found = json.loads(file.read_text())
        return dataclasses.replace(assumed, **found["slow"]), dataclasses.replace(assumed, **found["fast"])
    except (KeyError, TypeError, json.JSONDecodeError) as problem:
        raise ValueError(f"--links {file}: {problem!r}. Give what `zerosync doctor --link --save` wrote.") from None
