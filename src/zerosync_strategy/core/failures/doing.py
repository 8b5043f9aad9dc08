"""The enums on which a verdict depends: what a rank does, and why ranks wait in vain (W4).

Values are the words of error texts. A verdict depends on no other text.
"""

from __future__ import annotations

import enum
from enum import Enum
from typing import NamedTuple


class Doing(str, Enum):
    """What a rank does in the engine, as far as verdicts distinguish it."""

    FORWARD = "the forward"
    BACKWARD = "the backward"
    OWN_BACKWARD = "a backward"  # not begun by the engine
    REDUCTION = "the reduction"
    STEP = "the optimizer step"
    GATHER = "the gather"
    UPDATES = "the gather of the updated parameters"
    GRADIENTS = "the gather of the gradients"
    END = "the end of the training"  # at a barrier of a frontend
    ELSE = ""

    def __str__(self) -> str:
        return self.value

    @property
    def is_of_step(self) -> bool:
        """Whether it is part of every optimizer step."""
        return self not in (Doing.END, Doing.ELSE)


def doing_of(what: object) -> Doing:
    """Return the :class:`Doing` of an activity: itself, its attribute ``doing``, or else ``ELSE``."""
    found = what if isinstance(what, Doing) else getattr(what, "doing", None)
    return found if isinstance(found, Doing) else Doing.ELSE


class Cause(str, Enum):
    """Why ranks wait in vain. Each has a row in the table of docs/failures.md."""

    EXCEPTION = "exception"
    ENDED = "process ended"
    ELSEWHERE = "elsewhere"
    OTHER_BACKWARDS = "other backwards"
    OTHER_MODULES = "other modules"
    OTHER_CALL = "other call"
    OTHER_ORDER = "other order"
    OTHER_SIZES = "other sizes"
    SAME_CALL = "same call"
    REPORTED_BEFORE = "reported before"

    def __str__(self) -> str:
        return self.value


class Advice(Enum):
    """What a verdict recommends; its sentence is in ``words.py``."""

    OTHER_BACKWARDS = enum.auto()
    FEWER_BATCHES = enum.auto()


class Departure(NamedTuple):
    """How a rank's window departs from its last one, and the cause that this implies."""

    cause: Cause
    text: str
