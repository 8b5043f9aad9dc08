"""Budgets that set themselves: ``"auto"`` for gathered parameters and for unreduced gradients.

============  ==========================================  ===========================================
state         when a step has been taken                  what is held in the coming window
============  ==========================================  ===========================================
``MEASURES``  :data:`MEASURED` windows: -> ``HOLDS``      nothing
``HOLDS``     enough is left beside it: stay              the same
``HOLDS``     less is left: stay                          what fits into the smaller room
============  ==========================================  ===========================================

While the first windows measure, everything else (activations, parameters, states, temporary tensors) is looked at after
each forward, and each time that a gather or an unreduced gradient takes memory. What was used beside gathered
parameters is noted by how many bytes of these were there, in :data:`LEVELS` parts of all. If *h* bytes are held, then
where *g* bytes were gathered, at most min(all parameters, *h* + *g*) are; the most of that and of what was used beside
it, over all looks, is what holding *h* bytes will use. What a peak of the allocator had beyond all looks is added; a
peak in the optimizer's step counts as beside nothing that was gathered. What is held is the most that leaves a reserve
below the limit: a part of it, or as much as the memory after a forward has varied from window to window, if it is
more; what has varied may vary as much again. All parameters are held if half of that part is left: no gather is on its
way then, sooner or later, beside the rest. Where not all fit, of several nodes, node shards come before what is held in
full (``params/held.py``); they are there beside whatever is gathered.

The most that was seen never falls, and what is held never grows. It is cut when half of that part of the limit is no
longer left, and then to the reserve. So it is cut 64 times at most, and cannot oscillate.

Ranks agree by one message of 280 bytes per step: each level of the rank that needs most there decides. On a device with
streams the host reads the answer a step later, when it is there.

What grows by more than what is left from one step to the next is seen when it has happened: no budget foresees it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.budgets.gauges import DeviceGauge, Gauge, gauge_of
from zerosync_strategy.core.comm.streams import HostCopy, Streams
from zerosync_strategy.core.engine import zero
from zerosync_strategy.core.gradients.reducer import Reducer
from zerosync_strategy.core.options.config import ZeroSyncConfig
from zerosync_strategy.core.params.cache import ParameterCache
from zerosync_strategy.core.params.scheduler import GatherScheduler

MEASURED = 3
"""Windows before anything is held. Of the first, which makes the optimizer's states, only the peak counts."""
RESERVED = 32
"""One part of so many of the limit is in reserve at least."""
LEVELS = 32
"""Parts of all parameters by which it is noted how much was gathered at a moment."""
_NEVER = -(2**62)  # bytes that were used at a moment that there was none of


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
        room: bytes of the limit that are left beside everything else and what is held, on the rank with the least.
        parameters: bytes of gathered parameters that may be held, and of node shards; ``None``: that budget is not
            automatic.
        gradients: bytes of gradients that may stay unreduced; ``None``: as above.
        used_otherwise: the most bytes that everything else has used on this rank at once.
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
            f" used {self.used_otherwise} here, {self.reserve} are in reserve, and the rank with the least has"
            f" {self.room} left"
        )


@dataclass(frozen=True)
class Usage:
    """What the budgets are for, in use now.

    Attributes:
        held: bytes.
        gathered: bytes of gathered parameters that are not held.
    """

    held: int
    gathered: int = 0


class _Moments:
    """The most that this rank used beside what is gathered and held, by how much was gathered at that moment.

    Args:
        everything: bytes of all parameters that may be held.

    Attributes:
        beside: bytes, by level.
        unseen: the most bytes by which a peak was above all that was looked at in its window.
    """

    def __init__(self, everything: int) -> None:
        self._everything = everything
        self.beside = [_NEVER] * (LEVELS + 1)
        self.unseen = 0

    def see(self, used: int, usage: Usage) -> None:
        gathered = min(usage.gathered, self._everything)
        level = -(-gathered * LEVELS // self._everything) if self._everything else 0
        self.beside[level] = max(self.beside[level], used - usage.held - gathered)

    def used_with(self, held: int) -> int:
        """Return the most bytes that will be used if ``held`` bytes of parameters are held."""
        return self.unseen + _with(self.beside, held, self._everything)


def _with(beside: list[int], held: int, everything: int) -> int:
    """Return the most bytes, over the levels, beside which ``held`` bytes of parameters are held."""
    return max(each + min(everything, held + level * everything // LEVELS) for level, each in enumerate(beside))


def _most_beside(needed: list[int], most: int, everything: int, reserve: int) -> int:
    """Return how many bytes of parameters, up to ``most``, are held in full and leave ``reserve``, over the levels."""
    for level, each in enumerate(needed):
        if each + everything > -reserve:  # else all of them fit at such a moment
            most = min(most, -reserve - each - level * everything // LEVELS)
    return max(0, most)


class FixedBudgets:
    """No budget of an engine sets itself."""

    choice: None = None

    def sample(self) -> None: ...

    def step_begins(self) -> None: ...

    def end_window(self) -> None: ...


class AutomaticBudgets:
    """Chooses what one engine holds.

    Args:
        gauge: of this rank's memory.
        limit: bytes that this rank may use.
        usage: measures what the budgets are for.
        everything: bytes of all parameters that may be held.
        hold_parameters: takes bytes, holds what fits in them from the coming window on, and returns how many that is in
            full, and in node shards; ``None``: that budget is not automatic.
        hold_gradients: does so with gradients, and returns one number.
        process_group, device, streams: for the agreement.
        wanted_in_shards: returns the bytes of the node shards of all parameters that are worth one.

    Attributes:
        choice: in force.
    """

    def __init__(
        self,
        gauge: Gauge,
        limit: int,
        usage: Callable[[], Usage],
        everything: int,
        hold_parameters: Callable[[int], tuple[int, int]] | None,
        hold_gradients: Callable[[int], int] | None,
        process_group: Any,
        device: torch.device,
        streams: Streams,
        wanted_in_shards: Callable[[], int] = lambda: 0,
    ) -> None:
        self._gauge = gauge
        self._limit = limit
        self._usage = usage
        self._everything = everything
        self._hold_parameters = hold_parameters
        self._hold_gradients = hold_gradients
        self._wanted_in_shards = wanted_in_shards
        self._in_full = self._in_shards = 0  # of the parameters that are held
        self._process_group = process_group
        self._concurrent = streams.concurrent
        self._mine = torch.zeros(LEVELS + 3, dtype=torch.int64, pin_memory=streams.concurrent and device.type == "cuda")
        self._message = torch.zeros(LEVELS + 3, dtype=torch.int64, device=device)
        self._answer = HostCopy(streams, LEVELS + 3)
        self._is_asked = False
        self._windows = 0
        self._known_peak = gauge.peak()
        self._moments = _Moments(everything)
        self._looked = 0  # the most that a look found in use in this window
        self._after_forwards = _Variation()
        self.choice = self._choose(State.MEASURES, limit, limit, 0, 0, 0)

    @property
    def measures(self) -> bool:
        """Whether nothing is chosen yet."""
        return self.choice.state is State.MEASURES

    def look(self) -> None:
        """See what is in use now, because more memory is about to be taken. Only while it measures."""
        if not self.measures:
            return
        used, usage = self._gauge.used(), self._usage()
        self._looked = max(self._looked, used)
        self._moments.see(used, usage)

    def sample(self) -> None:
        """See what is in use after a forward."""
        used, usage = self._gauge.used(), self._usage()
        self._looked = max(self._looked, used)
        self._moments.see(used, usage)
        self._after_forwards.see(used - usage.held - usage.gathered)

    def step_begins(self) -> None:
        """The optimizer's step begins: its peak is another one."""
        if peak := self._new_peak():
            held = self._moments.used_with(self._in_full) + self._in_shards + (self.choice.gradients or 0)
            # Once it holds, only forwards are looked at; what is held was there, or less of it.
            expected = max(self._looked, 0 if self.measures else held - self._moments.unseen)
            self._moments.unseen = max(self._moments.unseen, peak - expected)
        self._looked = 0

    def end_window(self) -> None:
        """A step has been taken. Collective."""
        if peak := self._new_peak():  # as if all that is held were there then, beside nothing that is gathered
            self._moments.see(peak - self._moments.unseen, Usage(self.choice.nbytes))
        self.sample()
        self._looked = 0
        self._windows += 1
        self._after_forwards.count_window(is_first=self._windows == 1)
        needed = [max(_NEVER, each + self._moments.unseen - self._limit) for each in self._moments.beside]
        agreed = self._agree([*needed, self._after_forwards.nbytes, -self._limit])
        if agreed is None or self._windows < MEASURED:
            return
        *needed, varied, limit = agreed
        limit = -limit
        parameters, gradients = self.choice.parameters or 0, self.choice.gradients or 0
        if self.measures:
            self._hold(needed, varied, limit, self._everything, None, 0)
        elif self.choice.nbytes and self._left(needed) - gradients < limit // RESERVED // 2:
            self._hold(needed, varied, limit, parameters, gradients, self.choice.cuts + 1)

    def _left(self, needed: list[int]) -> int:
        """Return how many bytes are left beside what is held of the parameters."""
        return -_with(needed, self._in_full, self._everything) - self._in_shards

    def _hold(
        self, needed: list[int], varied: int, limit: int, parameters: int, gradients: int | None, cuts: int
    ) -> None:
        """Hold at most so many bytes of parameters and gradients, and what leaves the reserve."""
        everything, reserve = self._everything, max(limit // RESERVED, varied)
        # Parameters first: a micro-batch gathers each at least as often as it reduces its gradient.
        if self._hold_parameters is not None:
            left_by_all = -_with(needed, everything, everything)
            all_stay = parameters == everything and left_by_all >= max(limit // RESERVED // 2, varied)
            if not all_stay:
                in_full = _most_beside(needed, parameters, everything, reserve)
                wanted = self._wanted_in_shards() if in_full < everything else 0
                in_shards = min(wanted, parameters, max(0, -reserve - _with(needed, 0, everything)))
                if 0 < in_shards == wanted:
                    beside = [each + in_shards for each in needed]
                    in_full = _most_beside(beside, parameters - in_shards, everything, reserve)
                parameters = in_full if not wanted else in_shards + in_full * (in_shards == wanted)
            self._in_full, self._in_shards = self._hold_parameters(parameters)
        left = self._left(needed)
        if self._hold_gradients is None:
            gradients = 0
        else:
            room = max(0, left - reserve)
            gradients = self._hold_gradients(room if gradients is None else min(room, gradients))
        held = self._in_full + self._in_shards
        self.choice = self._choose(State.HOLDS, limit, left - gradients, held, gradients, cuts)

    def _new_peak(self) -> int | None:
        """Return the most that was ever in use, if that was since the last call."""
        known, self._known_peak = self._known_peak, self._gauge.peak()
        return self._known_peak if self._known_peak > known else None

    def _choose(self, state: State, limit: int, room: int, parameters: int, gradients: int, cuts: int) -> Choice:
        return Choice(
            state=state,
            limit=limit,
            room=room,
            parameters=None if self._hold_parameters is None else parameters,
            gradients=None if self._hold_gradients is None else gradients,
            used_otherwise=max(0, max(self._moments.beside)) + self._moments.unseen,
            reserve=self._reserve,
            cuts=cuts,
        )

    @property
    def _reserve(self) -> int:
        return max(self._limit // RESERVED, self._after_forwards.nbytes)

    def _agree(self, values: list[int]) -> list[int] | None:
        """Return the most of each of ``values`` of all ranks; ``None`` before the first answer is there."""
        from deepspeed import comm

        answer = self._answer.read() if self._is_asked and self._concurrent else None
        self._mine.copy_(torch.tensor(values))
        self._message.copy_(self._mine, non_blocking=True)
        comm.all_reduce(self._message, op=dist.ReduceOp.MAX, group=self._process_group)
        self._answer.begin(self._message)
        self._is_asked = True
        return answer if self._concurrent else self._answer.read()


class _Variation:
    """How much windows differ in the most that was used after a forward.

    Attributes:
        nbytes: between the least of a window and the most, without the first window.
    """

    def __init__(self) -> None:
        self.nbytes = self._most = self._now = 0
        self._least: int | None = None

    def see(self, nbytes: int) -> None:
        self._now = max(self._now, nbytes)

    def count_window(self, is_first: bool) -> None:
        self._most = max(self._most, self._now)
        if not is_first:
            self._least = self._now if self._least is None else min(self._least, self._now)
            self.nbytes = max(self.nbytes, self._most - self._least)
        self._now = 0


# ---- the budgets of an engine ------------------------------------------------------------------------------------


def check_limit(device: torch.device, config: ZeroSyncConfig) -> None:
    """Raise a ``ValueError`` where a budget of ``config`` sets itself, and nothing says what may be used."""
    for name, is_automatic in (
        ("param_memory_budget", config.parameters.automatic), ("grad_memory_budget", config.gradients.automatic),
    ):  # fmt: skip
        if is_automatic and config.auto_limit is None and device.type != "cuda":
            raise ValueError(
                f'ZeroSync option {name!r} got "auto" on a device of type {device.type!r}, whose free memory is not'
                ' known. Give a limit: {"auto": "8GiB"}, the resident memory that each rank\'s process may have.'
            )


def automatic_budgets(
    engine: Any, config: ZeroSyncConfig, reducer: Reducer, gathers: tuple[GatherScheduler, ParameterCache] | None = None
) -> FixedBudgets | AutomaticBudgets:
    """Return the budgets of ``engine`` that set themselves, as :func:`check_limit` has let pass.

    Args:
        gathers: on stage 3.
    """
    if not (config.parameters.automatic or config.gradients.automatic):
        return FixedBudgets()
    gauge, limit = gauge_of(engine.device), config.auto_limit
    if limit is None:
        assert isinstance(gauge, DeviceGauge)
        limit = gauge.limit()
    scheduler, cache = gathers if gathers is not None and config.parameters.automatic else (None, None)

    def usage() -> Usage:
        held = gathered = 0
        if config.gradients.automatic:  # what streams beyond them is none of the budget's
            held += min(reducer.local.now, reducer.deferred_bytes)
        if scheduler is not None and cache is not None:
            held += cache.plan.held_bytes + cache.plan.bytes_in_shards
            gathered = max(0, scheduler.unsharded.now - cache.plan.held_bytes)
        return Usage(held, gathered)

    budgets = AutomaticBudgets(
        gauge, limit, usage, 0 if cache is None else cache.plan.everything, None if cache is None else cache.set_budget,
        reducer.defer if config.gradients.automatic else None, zero.data_parallel_group(engine.optimizer),
        engine.device, reducer.streams, (lambda: 0) if cache is None else cache.plan.wanted_in_shards,
    )  # fmt: skip
    reducer.local.watch = budgets.look
    if gathers is not None:
        gathers[0].unsharded.watch = budgets.look
    return budgets
