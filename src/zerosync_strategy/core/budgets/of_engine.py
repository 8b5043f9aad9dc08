"""The automatic budgets of one attached engine: what they measure, and what they set."""

from __future__ import annotations

from typing import Any

from zerosync_strategy.core.budgets.automatic import AutomaticBudgets, Usage
from zerosync_strategy.core.budgets.gauges import DeviceGauge, gauge_of
from zerosync_strategy.core.engine import zero
from zerosync_strategy.core.gradients.reducer import Reducer
from zerosync_strategy.core.options.config import ZeroSyncConfig
from zerosync_strategy.core.params.cache import ParameterCache
from zerosync_strategy.core.params.scheduler import GatherScheduler


def automatic_budgets(
    engine: Any,
    config: ZeroSyncConfig,
    reducer: Reducer,
    scheduler: GatherScheduler | None,
    cache: ParameterCache | None,
) -> AutomaticBudgets | None:
    """Return the budgets of ``engine`` that set themselves; ``None``: its options ask for none.

    Args:
        engine: the DeepSpeed engine.
        config: the options, which :func:`~zerosync_strategy.core.options.checks.check_stage` has checked.
        reducer, scheduler, cache: of the engine; the last two on stage 3.
    """
    if not (config.auto_parameters or config.auto_gradients):
        return None
    gauge = gauge_of(engine.device)
    limit = config.auto_limit
    if limit is None:
        assert isinstance(gauge, DeviceGauge)  # check_stage() has seen to it
        limit = gauge.limit()

    def usage() -> Usage:
        held = gathered = 0
        if config.auto_gradients:  # what streams beyond them is none of the budget's
            held += min(reducer.local.now, reducer.deferred_bytes)
        if config.auto_parameters and scheduler is not None and cache is not None:
            held += cache.held_bytes
            gathered = max(0, scheduler.unsharded.now - cache.held_bytes)
        return Usage(held, gathered)

    def hold_parameters(nbytes: int) -> int:
        assert cache is not None
        return cache.set_budget(nbytes)

    budgets = AutomaticBudgets(
        gauge, limit, usage, cache.everything if config.auto_parameters and cache is not None else 0,
        hold_parameters if config.auto_parameters else None, reducer.defer if config.auto_gradients else None,
        zero.data_parallel_group(engine.optimizer), engine.device, reducer.streams,
    )  # fmt: skip
    reducer.local.watch = budgets.look
    if scheduler is not None:
        scheduler.unsharded.watch = budgets.look
    return budgets
