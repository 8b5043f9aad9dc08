"""Budgets that set themselves: ``"auto"`` for gathered parameters and for unreduced gradients.

The first :data:`MEASURED` windows hold nothing, and measure: after each forward, and each time that a gather or an
unreduced gradient takes memory, what is used beside gathered parameters is noted by how many bytes of these were there,
in :data:`LEVELS` parts of all. What a peak of the allocator had beyond all looks is added; a peak in the optimizer's
step counts as beside nothing that was gathered. One message of 280 bytes joins the tables: each level of the rank that
needs most there decides. From it, what to hold is chosen, once; what uses more later is not foreseen.

Where *g* bytes were gathered, holding *h* bytes has at most min(all parameters, *h* + *g*) there. What is held is the
most that leaves a reserve below the limit on every level: a part of the limit, or as much as the memory after a forward
has varied. All parameters are held if half of that part is left: no gather is on its way then beside the rest. Where
not all fit, of several nodes, node shards come before what is held in full (``params/held.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zerosync_strategy.core.comm.collectives import largest
from zerosync_strategy.core.engine import zero
from zerosync_strategy.core.gradients.reducer import Reducer
from zerosync_strategy.core.options.config import ZeroSyncConfig
from zerosync_strategy.core.params.of_module import ModuleParameters

_STATUS = Path("/proc/self/status")
_TAKEN = ("active_bytes", "inactive_split_bytes")  # of torch's statistics


class DeviceGauge:
    """What torch's allocator has taken of a GPU and cannot give back, or give out again whatever is asked for.

    Of its reserved memory that is: the blocks in use, those that wait for a stream, and the free parts of segments that
    are in use elsewhere. Segments that are free as a whole are not counted: they serve the next request, or go back to
    the device before the allocator gives up. A peak is the most at once, ever, or since others have reset it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def used(self) -> int:
        stats = torch.cuda.memory_stats(self._device)
        return sum(stats.get(f"{kind}.all.current", 0) for kind in _TAKEN)

    def peak(self) -> int:
        # The two have had their peaks at different moments, perhaps; all that was reserved is more than both at any.
        stats = torch.cuda.memory_stats(self._device)
        return min(sum(stats.get(f"{kind}.all.peak", 0) for kind in _TAKEN), stats.get("reserved_bytes.all.peak", 0))

    def limit(self) -> int:
        """Return what the process may use in all: what is free, and what its allocator has."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device)


class ProcessGauge:
    """The resident memory of this process. Linux."""

    def used(self) -> int:
        return self._read("VmRSS:")

    def peak(self) -> int:
        return self._read("VmHWM:")

    @staticmethod
    def _read(field: str) -> int:
        (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024


Gauge = DeviceGauge | ProcessGauge


def gauge_of(device: torch.device) -> Gauge:
    """Return the gauge of the memory of ``device``."""
    return DeviceGauge(device) if device.type == "cuda" else ProcessGauge()


MEASURED = 3
"""Windows before anything is held. Of the first, which makes the optimizer's states, only the peak counts."""
RESERVED = 32
"""One part of so many of the limit is in reserve at least."""
LEVELS = 32
"""Parts of all parameters by which it is noted how much was gathered at a moment."""
_NEVER = -(2**62)  # bytes that were used at a moment that there was none of


@dataclass(frozen=True)
class Memory:
    """What the measured windows used, on the rank that used most, in bytes.

    Attributes:
        other: what was used beside what was gathered, by level.
        everything: all parameters that may be held.
        limit: what a rank may use.
        varied: by how much the memory after a forward has varied.
    """

    other: list[int]
    everything: int
    limit: int
    varied: int

    @property
    def reserve(self) -> int:
        return max(self.limit // RESERVED, self.varied)

    def left(self, held: int) -> int:
        """Return how many bytes are left if ``held`` bytes of parameters are held."""
        gathered = [min(self.everything, held + self._gathered(level)) for level in range(LEVELS + 1)]
        return self.limit - max(map(sum, zip(self.other, gathered, strict=True)))

    def most(self) -> int:
        """Return how many bytes of parameters can be held in full."""
        if self.left(self.everything) >= max(self.limit // RESERVED // 2, self.varied):
            return self.everything
        most, allowed = self.everything, self.limit - self.reserve
        for level, each in enumerate(self.other):
            if each + self.everything > allowed:  # else all of them fit at such a moment
                most = min(most, allowed - each - self._gathered(level))
        return max(0, most)

    def _gathered(self, level: int) -> int:
        return level * self.everything // LEVELS


def parameter_budget(memory: Memory, in_shards: int) -> int:
    """Return how many bytes of parameters to hold, node shards (all of them: ``in_shards`` bytes) included."""
    if (in_full := memory.most()) == memory.everything or not in_shards:
        return in_full
    shards = min(in_shards, max(0, memory.left(0) - memory.reserve))
    if shards < in_shards:
        return shards
    return shards + replace(memory, other=[each + shards for each in memory.other]).most()


def gradient_budget(memory: Memory, in_full: int, in_shards: int) -> int:
    """Return how many bytes of gradients to leave unreduced, beside so many of parameters in full and in shards."""
    return max(0, memory.left(in_full) - in_shards - memory.reserve)


@dataclass(frozen=True)
class Choice:
    """The budgets that were chosen, in bytes, and why. ``None``: that budget is not automatic.

    Attributes:
        limit: what the rank that has the fewest may use.
        room: what is left of it beside everything else and what is held, on the rank with the least.
        parameters: of gathered parameters that are held, and of node shards.
        gradients: of gradients that stay unreduced.
        used_otherwise: the most that everything else has used at once, on the rank that used most.
        reserve: what is left free.
    """

    limit: int
    room: int
    parameters: int | None
    gradients: int | None
    used_otherwise: int
    reserve: int

    def __str__(self) -> str:
        given = {"parameters": self.parameters, "gradients": self.gradients}
        held = " and ".join(f"{nbytes} bytes of {what}" for what, nbytes in given.items() if nbytes is not None)
        return (
            f"holds {held}: of a limit of {self.limit} bytes everything else has used {self.used_otherwise},"
            f" {self.reserve} are in reserve, and the rank with the least has {self.room} left"
        )


class AutomaticBudgets:
    """Measures what one engine uses, and chooses what it holds.

    ``gathered`` returns the bytes of gathered parameters, of which ``everything`` may be held; ``hold`` holds what was
    chosen from the coming window on. ``limit`` is asked for then: communicators, which backends make when they are used
    first, take memory that no allocator of torch's knows. ``choice`` is ``None`` while it measures.
    """

    def __init__(
        self, gauge: Gauge, limit: Callable[[], int], gathered: Callable[[], int], everything: int,
        hold: Callable[[Memory], Choice], process_group: Any,
    ) -> None:  # fmt: skip
        self._gauge, self._limit, self._gathered, self._everything = gauge, limit, gathered, everything
        self._hold, self._process_group = hold, process_group
        self.choice: Choice | None = None
        self._beside = [_NEVER] * (LEVELS + 1)
        self._unseen = 0  # the most bytes by which a peak was above all that was looked at in its window
        self._looked = 0  # the most that a look found in use in this window
        self._after_forwards = [0]  # the most, by window
        self._known_peak = gauge.peak()

    def look(self) -> int:
        """See what is in use now, because more memory is about to be taken; return it without what is gathered."""
        used, gathered = self._gauge.used(), self._gathered()
        self._looked = max(self._looked, used)
        return self._note(used, gathered)

    def forward_ended(self) -> None:
        if self.choice is None:
            self._after_forwards[-1] = max(self._after_forwards[-1], self.look())

    def step_begins(self) -> None:
        """The optimizer's step begins: its peak is another one."""
        if self.choice is None and (peak := self._new_peak()):
            self._unseen = max(self._unseen, peak - self._looked)

    def step_ended(self) -> None:
        """A step has been taken. Collective once, when enough was measured."""
        if self.choice is not None:
            return
        if peak := self._new_peak():
            self._note(peak - self._unseen, 0)
        self.forward_ended()
        if len(self._after_forwards) < MEASURED:
            self._after_forwards.append(0)
            self._looked = 0
            return
        varied = max(self._after_forwards) - min(self._after_forwards[1:])
        limit = self._limit()
        needed = [max(_NEVER, each + self._unseen - limit) for each in self._beside]
        *needed, varied, limit = largest([*needed, varied, -limit], self._process_group)
        self.choice = self._hold(Memory([each - limit for each in needed], self._everything, -limit, varied))

    def _note(self, used: int, gathered: int) -> int:
        gathered = min(gathered, self._everything)
        level = -(-gathered * LEVELS // self._everything) if self._everything else 0
        self._beside[level] = max(self._beside[level], used - gathered)
        return used - gathered

    def _new_peak(self) -> int | None:
        """Return the most that was ever in use, if that was since the last call."""
        known, self._known_peak = self._known_peak, self._gauge.peak()
        return self._known_peak if self._known_peak > known else None


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
    engine: Any, config: ZeroSyncConfig, reducer: Reducer, of_module: ModuleParameters | None
) -> AutomaticBudgets | None:
    """Return the budgets that set themselves, as :func:`check_limit` has let pass; ``None``: none does."""
    if not (config.parameters.automatic or config.gradients.automatic):
        return None
    gauge, given = gauge_of(engine.device), config.auto_limit

    def limit() -> int:
        if given is not None:
            return given
        assert isinstance(gauge, DeviceGauge)
        return gauge.limit()

    cache = of_module.cache if of_module is not None and config.parameters.automatic else None
    watched: list[Any] = [reducer.local]
    if of_module is not None:
        watched.append(of_module.scheduler.issuing.unsharded)

    def hold(memory: Memory) -> Choice:
        for each in watched:
            each.watch = None
        # Parameters first: a micro-batch gathers each at least as often as it reduces its gradient.
        in_full = in_shards = gradients = 0
        if cache is not None:
            in_full, in_shards = cache.set_budget(parameter_budget(memory, cache.plan.wanted_in_shards()))
        if config.gradients.automatic:
            gradients = reducer.defer(gradient_budget(memory, in_full, in_shards))
        return Choice(
            limit=memory.limit,
            room=memory.left(in_full) - in_shards - gradients,
            parameters=None if cache is None else in_full + in_shards,
            gradients=gradients if config.gradients.automatic else None,
            used_otherwise=max(memory.other),
            reserve=memory.reserve,
        )

    budgets = AutomaticBudgets(
        gauge, limit, lambda: 0 if cache is None else watched[1].now,
        0 if cache is None else cache.plan.everything, hold, zero.data_parallel_group(engine.optimizer),
    )  # fmt: skip
    for each in watched:
        each.watch = budgets.look
    return budgets
