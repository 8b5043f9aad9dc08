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

Ranks agree by one message of 32 bytes per step, and the rank with the least room decides. On a device with streams the
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
        now: bytes now.
        peak: the most in the window that has ended.
        transient: the most of the parameters that were gathered and not held.
    """

    now: int
    peak: int
    transient: int


@dataclass(frozen=True)
class Held:
    """What a budget allows.

    Attributes:
        nbytes: that stay.
        needs: bytes that it takes at most, with what comes and goes beside it.
    """

    nbytes: int = 0
    needs: int = 0


class AutomaticBudgets:
    """Chooses what one engine holds.

    Args:
        gauge: of this rank's memory.
        limit: bytes that this rank may use.
        usage: measures what the budgets are for.
        hold_parameters: takes the room, and the most bytes that come and go beside what is held, the same on all ranks,
            and holds what fits from the coming window on; ``None``: that budget is not automatic.
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
        hold_parameters: Callable[[int, int], Held] | None,
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
        self._message = torch.zeros(4, dtype=torch.int64, device=device)
        self._answer = HostCopy(streams, 4)
        self._is_asked = False
        self._windows = 0
        self._known_peak = gauge.peak()
        self._most = 0  # used by everything else, in this window
        self._most_ever = self._varied = self._transient = 0
        self._least: int | None = None  # of the windows' own, without the first
        self._needs = 0  # what the choice takes
        self.choice = self._choose(State.MEASURES, limit, 0, Held(), Held())

    def sample(self) -> None:
        """Look at what is in use now: where it may be the most."""
        self._most = max(self._most, self._gauge.used() - self._usage().now)

    def end_window(self) -> None:
        """A step has been taken. Collective."""
        self.sample()
        self._windows += 1
        usage = self._usage()
        if (peak := self._gauge.peak()) > self._known_peak:  # so it was in this window
            self._most = max(self._most, peak - usage.peak)
        self._known_peak = peak
        self._most_ever = max(self._most_ever, self._most)
        self._transient = max(self._transient, usage.transient)
        if self._windows > 1:
            self._least = self._most if self._least is None else min(self._least, self._most)
            self._varied = max(self._varied, self._most_ever - self._least)
        self._most = 0
        left = self._limit - self._most_ever
        agreed = self._agree([left - self._reserve, left, self._limit, -self._transient])
        if agreed is None or self._windows < MEASURED:
            return
        room, left, limit, transient = agreed
        if self.choice.state is State.MEASURES:
            self._hold(limit, max(0, room), -transient, self.choice.cuts)
        elif self._needs > left - limit // RESERVED // 2 and self.choice.nbytes:
            self._hold(limit, max(0, min(room, self._needs - 1)), -transient, self.choice.cuts + 1)

    def _hold(self, limit: int, room: int, transient: int, cuts: int) -> None:
        parameters = gradients = Held()
        if self._hold_parameters is not None:  # first: a micro-batch gathers each at least as often as it reduces it
            parameters = self._hold_parameters(room, transient)
        if self._hold_gradients is not None:
            gradients = self._hold_gradients(max(0, room - parameters.needs))
        self._needs = parameters.needs + gradients.needs
        self.choice = self._choose(State.HOLDS, limit, room, parameters, gradients, cuts)

    def _choose(self, state: State, limit: int, room: int, parameters: Held, gradients: Held, cuts: int = 0) -> Choice:
        return Choice(
            state=state,
            limit=limit,
            room=room,
            parameters=None if self._hold_parameters is None else parameters.nbytes,
            gradients=None if self._hold_gradients is None else gradients.nbytes,
            used_otherwise=self._most_ever,
            reserve=self._reserve,
            cuts=cuts,
        )

    @property
    def _reserve(self) -> int:
        return max(self._limit // RESERVED, self._varied)

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
