"""Budgets that set themselves: ``"auto"`` for gathered parameters and for unreduced gradients.

============  ==========================================  ===========================================
state         when a step has been taken                  what is held in the coming window
============  ==========================================  ===========================================
``MEASURES``  :data:`MEASURED` windows: -> ``HOLDS``      nothing
``HOLDS``     enough is left beside it: stay              the same
``HOLDS``     less is left: stay                          what fits into the smaller room
============  ==========================================  ===========================================

The *room* is the limit, less the most that everything else has used at once (activations, parameters, states,
temporary tensors), less a reserve: a part of the limit, or as much as that most has varied from window to window, if it
is more; what has varied may vary as much again. The most that was seen never falls, and what is held never grows. It is
cut only when everything else has grown so far that half of that part of the limit is no longer left, and then to the
room. So it is cut 64 times at most, and cannot oscillate.

Parameters that are gathered without being held count as everything else where a part of them is to be held beside them.
If all are held, there are no others: whether all fit is decided by what was used but for gathered parameters.

Ranks agree by one message of 40 bytes per step, and the rank with the least room decides. On a device with streams the
host reads the answer a step later, when it is there.

What grows by more than what is left from one step to the next is seen when it has happened: no budget foresees it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.streams import HostCopy, Streams
from zerosync_strategy.core.memory import Gauge

MEASURED = 3
"""Windows before anything is held. Of the first, which makes the optimizer's states, only the peak counts."""
RESERVED = 32
"""One part of so many of the limit is in reserve at least."""


class State(enum.Enum):
    """Where the choice is; the table above has the transitions."""

    MEASURES = "measures"
    HOLDS = "holds"


@dataclass(frozen=True)
class Choice:
    """The budgets in force in a step, and why.

    Attributes:
        state: ``MEASURES`` or ``HOLDS``.
        limit: bytes that the rank which has the fewest may use.
        room: bytes of the limit that are left on the rank which has the least left.
        parameters: bytes of gathered parameters that may be held; ``None``: that budget is not automatic.
        gradients: bytes of gradients that may stay unreduced; ``None``: as above.
        used_otherwise: the most bytes that everything else has used on this rank.
        reserve: bytes that this rank leaves free.
        cuts: how often the budgets were cut.
    """

    state: State
    limit: int
    room: int
    parameters: int | None
    gradients: int | None
    used_otherwise: int
    reserve: int
    cuts: int

    @property
    def nbytes(self) -> int:
        """Bytes that may be held in all."""
        return (self.parameters or 0) + (self.gradients or 0)

    def __str__(self) -> str:
        given = {"parameters": self.parameters, "gradients": self.gradients}
        held = " and ".join(f"{nbytes} bytes of {what}" for what, nbytes in given.items() if nbytes is not None)
        return (
            f"{self.state.value} {held}, cut {self.cuts} times: of a limit of {self.limit} bytes everything else has"
            f" used {self.used_otherwise} here, {self.reserve} are in reserve, and the rank with the least has room for"
            f" {self.room}"
        )


@dataclass(frozen=True)
class Usage:
    """What the budgets are for, in use.

    Attributes:
        held: bytes now.
        peak_held: the most in the window that has ended.
        gathered: bytes now of gathered parameters that are not held.
        peak_gathered: the most of gathered parameters, held or not, in the window that has ended.
    """

    held: int
    peak_held: int
    gathered: int = 0
    peak_gathered: int = 0


class _Most:
    """The most that was used of something, and how much the windows differ.

    Attributes:
        ever: since the start.
        varied: between the least of a window and the most, without the first window.
    """

    def __init__(self) -> None:
        self.ever = self.varied = self._now = 0
        self._least: int | None = None

    def see(self, nbytes: int) -> None:
        self._now = max(self._now, nbytes)

    def end_window(self, is_first: bool) -> None:
        self.ever = max(self.ever, self._now)
        if not is_first:
            self._least = self._now if self._least is None else min(self._least, self._now)
            self.varied = max(self.varied, self.ever - self._least)
        self._now = 0


@dataclass(frozen=True)
class Room:
    """What the ranks have agreed on.

    Attributes:
        for_all: bytes for everything, if all parameters are held.
        for_part: else.
    """

    for_all: int
    for_part: int


@dataclass(frozen=True)
class Held:
    """What a budget allows.

    Attributes:
        nbytes: that stay.
        is_all: all parameters do.
    """

    nbytes: int = 0
    is_all: bool = False


class AutomaticBudgets:
    """Chooses what one engine holds.

    Args:
        gauge: of this rank's memory.
        limit: bytes that this rank may use.
        usage: measures what the budgets are for.
        hold_parameters: takes the room, and holds what fits from the coming window on; ``None``: that budget is not
            automatic.
        hold_gradients: takes the room, and does so with gradients.
        process_group, device, streams: for the agreement.

    Attributes:
        choice: in force.
    """

    def __init__(
        self,
        gauge: Gauge,
        limit: int,
        usage: Callable[[], Usage],
        hold_parameters: Callable[[Room], Held] | None,
        hold_gradients: Callable[[int], Held] | None,
        process_group: Any,
        device: torch.device,
        streams: Streams,
    ) -> None:
        self._gauge = gauge
        self._limit = limit
        self._usage = usage
        self._hold_parameters = hold_parameters
        self._hold_gradients = hold_gradients
        self._process_group = process_group
        self._concurrent = streams.concurrent
        self._message = torch.zeros(5, dtype=torch.int64, device=device)
        self._answer = HostCopy(streams, 5)
        self._is_asked = False
        self._windows = 0
        self._known_peak = gauge.peak()
        self._beside_held, self._beside_gathered = _Most(), _Most()
        self._holds_all = False
        self.choice = self._choose(State.MEASURES, limit, 0, Held(), Held())

    def sample(self) -> None:
        """Look at what is in use now: where it may be the most."""
        used, usage = self._gauge.used(), self._usage()
        self._beside_held.see(used - usage.held)
        self._beside_gathered.see(used - usage.held - usage.gathered)

    def end_window(self) -> None:
        """A step has been taken. Collective."""
        self.sample()
        self._windows += 1
        usage = self._usage()
        if (peak := self._gauge.peak()) > self._known_peak:  # so it was in this window
            self._beside_held.see(peak - usage.peak_held)
            self._beside_gathered.see(peak - usage.peak_gathered)
        self._known_peak = peak
        for most in (self._beside_held, self._beside_gathered):
            most.end_window(is_first=self._windows == 1)
        left = [self._limit - self._beside_gathered.ever, self._limit - self._beside_held.ever]
        agreed = self._agree([*(each - self._reserve for each in left), *left, self._limit])
        if agreed is None or self._windows < MEASURED:
            return
        *room, left_for_all, left_for_part, limit = agreed
        left_for_it = left_for_all if self._holds_all else left_for_part
        if self.choice.state is State.MEASURES:
            self._hold(limit, Room(*room), self.choice.cuts)
        elif self.choice.nbytes and self.choice.nbytes > left_for_it - limit // RESERVED // 2:
            self._hold(limit, Room(*(min(each, self.choice.nbytes - 1) for each in room)), self.choice.cuts + 1)

    def _hold(self, limit: int, room: Room, cuts: int) -> None:
        parameters = gradients = Held()
        if self._hold_parameters is not None:  # first: a micro-batch gathers each at least as often as it reduces it
            parameters = self._hold_parameters(Room(max(0, room.for_all), max(0, room.for_part)))
        self._holds_all = parameters.is_all
        left = room.for_all if parameters.is_all else room.for_part
        if self._hold_gradients is not None:
            gradients = self._hold_gradients(max(0, left - parameters.nbytes))
        self.choice = self._choose(State.HOLDS, limit, left, parameters, gradients, cuts)

    def _choose(self, state: State, limit: int, room: int, parameters: Held, gradients: Held, cuts: int = 0) -> Choice:
        return Choice(
            state=state,
            limit=limit,
            room=room,
            parameters=None if self._hold_parameters is None else parameters.nbytes,
            gradients=None if self._hold_gradients is None else gradients.nbytes,
            used_otherwise=(self._beside_gathered if self._holds_all else self._beside_held).ever,
            reserve=self._reserve,
            cuts=cuts,
        )

    @property
    def _reserve(self) -> int:
        return max(self._limit // RESERVED, self._beside_gathered.varied)

    def _agree(self, values: list[int]) -> list[int] | None:
        """Return the least of each of ``values`` of all ranks; ``None`` before the first answer is there."""
        from deepspeed import comm

        answer = self._answer.read() if self._is_asked and self._concurrent else None
        for element, value in zip(self._message, values, strict=True):
            element.fill_(value)
        comm.all_reduce(self._message, op=dist.ReduceOp.MIN, group=self._process_group)
        self._answer.begin(self._message)
        self._is_asked = True
        return answer if self._concurrent else self._answer.read()
