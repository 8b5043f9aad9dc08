"""The automatic budgets of one attached engine: what they measure, and what they set."""

from __future__ import annotations

from typing import Any

from zerosync_strategy.core.budgets import AutomaticBudgets, Held, Room, Usage
from zerosync_strategy.core.config import ZeroSyncConfig
from zerosync_strategy.core.engine import zero
from zerosync_strategy.core.gradients.reducer import Reducer
from zerosync_strategy.core.memory import DeviceGauge, gauge_of
from zerosync_strategy.core.meter import StepMeter
from zerosync_strategy.core.params.cache import ParameterCache
from zerosync_strategy.core.params.scheduler import GatherScheduler


def automatic_budgets(
    engine: Any,
    config: ZeroSyncConfig,
    reducer: Reducer,
    scheduler: GatherScheduler | None,
    cache: ParameterCache | None,
    meter: StepMeter,
) -> AutomaticBudgets | None:
    """Return the budgets of ``engine`` that set themselves; ``None``: its options ask for none.

    Args:
        engine: the DeepSpeed engine.
        config: the options, which :func:`~zerosync_strategy.core.stage_options.check_stage` has checked.
        reducer, scheduler, cache: of the engine; the last two on stage 3.
        meter: has the most that was used in the last step.
    """
    if not (config.auto_parameters or config.auto_gradients):
        return None
    gauge = gauge_of(engine.device)
    limit = config.auto_limit
    if limit is None:
        assert isinstance(gauge, DeviceGauge)  # check_stage() has seen to it
        limit = gauge.limit()

    def usage() -> Usage:
        held = peak = peak_gathered = gathered = 0
        report = meter.report
        if config.auto_gradients:  # what streams beyond them is none of the budget's
            held += min(reducer.local.now, reducer.deferred_bytes)
            peak += min(report.peak_unreduced_bytes, reducer.deferred_bytes) if report is not None else 0
            peak_gathered = peak
        if config.auto_parameters and scheduler is not None and cache is not None:
            held += cache.held_bytes
            gathered = max(0, scheduler.unsharded.now - cache.held_bytes)
            if report is not None:
                peak += report.peak_held_bytes
                peak_gathered += report.peak_unsharded_bytes
        return Usage(held, peak, gathered, peak_gathered)

    def hold_parameters(room: Room) -> Held:
        assert cache is not None
        everything = cache.everything
        nbytes = cache.set_budget(everything if everything <= room.for_all else min(room.for_part, everything - 1))
        return Held(nbytes, is_all=nbytes == everything)

    def hold_gradients(room: int) -> Held:
        return Held(reducer.defer(room))

    return AutomaticBudgets(
        gauge, limit, usage,
        hold_parameters if config.auto_parameters else None, hold_gradients if config.auto_gradients else None,
        zero.data_parallel_group(engine.optimizer), engine.device, reducer.streams,
    )  # fmt: skip
