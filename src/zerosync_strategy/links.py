"""The speed of what connects ranks: what a plan assumes and the doctor measures."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
    """Return bytes per second from a text such as ``"400Gbit/s"`` or ``"300GB/s"``.

    Raises:
        ValueError: it is none, or not positive.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(bit|B)/s", value.strip())
    if match is None or not float(match[1]):
        raise ValueError(f"{option} takes a speed such as '400Gbit/s' or '300GB/s', got {value!r}.")
    return float(match[1]) * _PREFIX[match[2]] / (8 if match[3] == "bit" else 1)


def parse_latency(option: str, value: str) -> float:
    """Return seconds from a text such as ``"20us"`` or ``"0.1ms"``.

    Raises:
        ValueError: it is none, or not positive.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|ms|us)", value.strip())
    if match is None or not float(match[1]):
        raise ValueError(f"{option} takes a time such as '20us' or '0.1ms', got {value!r}.")
    return float(match[1]) * _SECONDS[match[2]]
