"""A mechanism that several engines over one module have in common: made for the first, removed with the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Mechanism = TypeVar("_Mechanism")


def acquire(owner: Any, name: str, make: Callable[[], _Mechanism]) -> _Mechanism:
    """Return the mechanism that ``owner`` has under ``name``, with one more user; make it for the first."""
    attribute = f"_zerosync_shared_{name}"
    mechanism, users = getattr(owner, attribute, None) or (make(), 0)
    setattr(owner, attribute, (mechanism, users + 1))
    return mechanism


def release(owner: Any, name: str) -> bool:
    """Give up one use. Return whether it was the last, and the mechanism must be removed."""
    attribute = f"_zerosync_shared_{name}"
    mechanism, users = getattr(owner, attribute)
    if users > 1:
        setattr(owner, attribute, (mechanism, users - 1))
        return False
    delattr(owner, attribute)
    return True
