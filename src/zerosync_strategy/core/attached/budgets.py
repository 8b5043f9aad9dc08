"""Budgets that ZeroSync chooses: ``"auto"`` for gathered parameters and unreduced gradients, and a bound without any.

The first :data:`MEASURED` windows hold nothing, and measure. After each forward, and before each allocation of a gather
or an unreduced gradient, they record the memory used by everything except gathered parameters. The table has a row per
level: the bytes of gathered parameters at that moment, in :data:`LEVELS` parts of all parameters. The amount by which a
peak of the allocator exceeds all looks is added. A peak in the optimizer's step counts at level 0. One message of 280
bytes merges the tables of the ranks: in each row, the rank that needs most decides. Then the budgets are chosen, once.
Anything that uses more memory later is not foreseen.

If *g* bytes were gathered at a moment, holding *h* bytes means at most min(all parameters, *h* + *g*) at that moment.
The budget is the largest that leaves a reserve below the limit at every level. The reserve is a part of the limit, or
the variation of the memory after forwards, if larger. All parameters are held if half of that part is left, because
then no gather needs memory in addition. If not all fit, on several nodes, node shards have priority over parameters
held in full (``params/held.py``).

Where no budget is given, gradients that the device cannot hold are reduced as they come (:func:`bounded`). Stock
DeepSpeed's ZeRO-2 and 3 keep a shard of the gradients between two backwards; ZeroSync keeps them in full, to reduce
them once. A model that trains only because they are sharded must train here, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.announcement import say
from zerosync_strategy.core.comm.collectives import largest
from zerosync_strategy.core.engine import zero, zero3
from zerosync_strategy.core.engine.types import DeepSpeedEngine
from zerosync_strategy.core.gradients.reducer import Reducer
from zerosync_strategy.core.gradients.stage12 import why_stock
from zerosync_strategy.core.options import ZeroSyncConfig
from zerosync_strategy.core.params.module_parameters import ModuleParameters
from zerosync_strategy.core.report import Choice, size_text

SHARE = 4
"""Unreduced gradients may take a quarter of the device more than stock DeepSpeed's gradients."""


def device_memory(device: torch.device) -> tuple[int, int] | None:
    """Return the bytes that are free for this process, and all of ``device``; ``None`` if that is not known."""
    if device.type != "cuda":
        return None
    gauge = DeviceGauge(device)
    return gauge.limit() - gauge.used(), torch.cuda.mem_get_info(device)[1]


def bounded(engine: DeepSpeedEngine, config: ZeroSyncConfig, ranks: int) -> ZeroSyncConfig:
    """Return ``config``, with ``coalesce=False`` if unreduced gradients would not fit. Collective on CUDA.

    ``ranks``: that shard the gradients. A given budget is kept.
    """
    memory = device_memory(engine.device)
    if memory is None or not config.coalesce or config.grad_memory_budget is not None:
        return config
    if zero.stage(engine) < 3 and why_stock(engine.optimizer):
        return config  # its gradients are reduced at the close
    free, device = memory
    numel = sum(zero3.full_numel(param) for param in engine.module.parameters() if param.requires_grad)
    full = numel * zero.accumulation_dtype(engine.optimizer).itemsize
    stock = full if zero.stage(engine) == 1 else full // ranks
    exceeds = full > free or (full - stock) * SHARE > device
    if not largest([int(exceeds)], zero.data_parallel_group(engine.optimizer))[0]:
        return config
    if dist.get_rank() == 0:
        say(
            f"the gradients of one rank take {size_text(full)} until they are reduced, of {size_text(free)} that are"
            f" free on {size_text(device)}: each backward reduces its own, as stock DeepSpeed does (coalesce=False)."
            " grad_memory_budget says how much may stay unreduced, and saves that much of each further backward."
        )
    return replace(config, coalesce=False)


_STATUS = Path("/proc/self/status")
_TAKEN = ("active_bytes", "inactive_split_bytes")  # of torch's statistics


class DeviceGauge:
    """The GPU memory that torch's allocator can neither return to the device nor use for any request.

    It consists of the blocks in use, the freed blocks that wait for a stream, and the free parts of segments that are
    partly in use. Free segments are not counted: they serve the next request, or are returned to the device before the
    allocator fails. A peak is the maximum since the start of the process, or since something else has reset it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def used(self) -> int:
        stats = torch.cuda.memory_stats(self._device)
        return sum(stats.get(f"{kind}.all.current", 0) for kind in _TAKEN)

    def peak(self) -> int:
        # The two peaks may be of different moments. At any moment, the reserved memory is at least the sum of both.
        stats = torch.cuda.memory_stats(self._device)
        return min(sum(stats.get(f"{kind}.all.peak", 0) for kind in _TAKEN), stats.get("reserved_bytes.all.peak", 0))

    def limit(self) -> int:
        """Return the bytes that the process may use in all: free memory plus what its allocator has reserved."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device)


class ProcessGauge:
    """The resident memory of this process (Linux only)."""

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
"""Windows before anything is held. In the first, which makes the optimizer's states, only the peak counts."""
RESERVED = 32
"""At least 1/32 of the limit is kept in reserve."""
LEVELS = 32
"""Number of parts of all parameters, in which the gathered bytes at a moment are counted."""
_NEVER = -(2**62)  # bytes used at a level that never occurred


@dataclass(frozen=True)
class PeakMemory:
    """What the measured windows used, on the rank that used most, in bytes.

    Attributes:
        other: by level, the memory used by everything except gathered parameters.
        everything: all parameters that may be held.
        limit: what a rank may use.
        varied: the variation of the memory after a forward.
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
            if each + self.everything > allowed:  # else all parameters fit at this level
                most = min(most, allowed - each - self._gathered(level))
        return max(0, most)

    def _gathered(self, level: int) -> int:
        return level * self.everything // LEVELS


def parameter_budget(memory: PeakMemory, in_shards: int) -> int:
    """Return how many bytes of parameters to hold, node shards included. All node shards take ``in_shards`` bytes."""
    if (in_full := memory.most()) == memory.everything or not in_shards:
        return in_full
    shards = min(in_shards, max(0, memory.left(0) - memory.reserve))
    if shards < in_shards:
        return shards
    return shards + replace(memory, other=[each + shards for each in memory.other]).most()


def gradient_budget(memory: PeakMemory, in_full: int, in_shards: int) -> int:
    """Return how many bytes of gradients to leave unreduced, given the held parameters in full and in node shards."""
    return max(0, memory.left(in_full) - in_shards - memory.reserve)


class AutomaticBudgets:
    """Measures the memory of one engine, and chooses its budgets.

    ``gathered`` returns the bytes of gathered parameters, of which ``everything`` may be held. ``hold`` chooses the
    budgets from the next window on. ``limit`` is called only then, because communicators, which backends make at first
    use, take memory outside of torch's allocators. ``choice`` is ``None`` during the measurement.
    """

    def __init__(
        self, gauge: Gauge, limit: Callable[[], int], gathered: Callable[[], int], everything: int,
        hold: Callable[[PeakMemory], Choice], process_group: dist.ProcessGroup,
    ) -> None:  # fmt: skip
        self._gauge, self._limit, self._gathered, self._everything = gauge, limit, gathered, everything
        self._hold, self._process_group = hold, process_group
        self.choice: Choice | None = None
        self._beside = [_NEVER] * (LEVELS + 1)
        self._unseen = 0  # most bytes by which a peak exceeded all looks of its window
        self._looked = 0  # most bytes that a look found in use in this window
        self._after_forwards = [0]  # most bytes after a forward, by window
        self._known_peak = gauge.peak()

    def look(self) -> int:
        """Record the memory in use, before more is allocated; return it without gathered parameters."""
        used, gathered = self._gauge.used(), self._gathered()
        self._looked = max(self._looked, used)
        return self._note(used, gathered)

    def forward_ended(self) -> None:
        if self.choice is None:
            self._after_forwards[-1] = max(self._after_forwards[-1], self.look())

    def step_begins(self) -> None:
        """Record the peak before the optimizer's step, which has a peak of its own."""
        if self.choice is None and (peak := self._new_peak()):
            self._unseen = max(self._unseen, peak - self._looked)

    def step_ended(self) -> None:
        """Record the peak of the step. After the last measured window, choose the budgets: collective then."""
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
        self.choice = self._hold(PeakMemory([each - limit for each in needed], self._everything, -limit, varied))

    def _note(self, used: int, gathered: int) -> int:
        gathered = min(gathered, self._everything)
        level = -(-gathered * LEVELS // self._everything) if self._everything else 0
        self._beside[level] = max(self._beside[level], used - gathered)
        return used - gathered

    def _new_peak(self) -> int | None:
        """Return the gauge's peak if it has risen since the last call."""
        known, self._known_peak = self._known_peak, self._gauge.peak()
        return self._known_peak if self._known_peak > known else None


# ---- the budgets of an engine ------------------------------------------------------------------------------------


def check_limit(device: torch.device, config: ZeroSyncConfig) -> None:
    """Raise a ``ValueError`` if a budget of ``config`` is automatic and its limit is unknown."""
    for name, is_automatic in (
        ("param_memory_budget", config.parameters.automatic), ("grad_memory_budget", config.gradients.automatic),
    ):  # fmt: skip
        if is_automatic and config.auto_limit is None and device.type != "cuda":
            raise ValueError(
                f'ZeroSync option {name!r} got "auto" on a device of type {device.type!r}, whose free memory is not'
                ' known. Give a limit: {"auto": "8GiB"}, the resident memory that each rank\'s process may have.'
            )


def automatic_budgets(
    engine: DeepSpeedEngine, config: ZeroSyncConfig, reducer: Reducer, of_module: ModuleParameters | None
) -> AutomaticBudgets | None:
    """Return the automatic budgets, after :func:`check_limit`; ``None`` if no budget is automatic."""
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

    def hold(memory: PeakMemory) -> Choice:
        for each in watched:
            each.watch = None
        # Parameters first: a micro-batch gathers a parameter at least as often as it reduces its gradient.
        in_full = in_shards = gradients = 0
        if cache is not None:
            in_full, in_shards = cache.set_budget(parameter_budget(memory, cache.plan.wanted_in_shards()))
        if config.gradients.automatic:
            gradients = reducer.keep(gradient_budget(memory, in_full, in_shards))
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
