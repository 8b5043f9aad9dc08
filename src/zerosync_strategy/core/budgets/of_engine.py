"""The automatic budgets of one attached engine: what they measure, and what they set."""

from __future__ import annotations

from typing import Any

import torch

from zerosync_strategy.core.budgets.automatic import AutomaticBudgets, FixedBudgets, Usage
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
    scheduler: GatherScheduler | None = None,
    cache: ParameterCache | None = None,
) -> FixedBudgets | AutomaticBudgets:
    """Return the budgets of ``engine`` that set themselves, if its options ask for some.

    Args:
        engine: the DeepSpeed engine.
        config: the options, which :func:`check_limit` has checked.
        reducer, scheduler, cache: of the engine; the last two on stage 3.
    """
    if not (config.auto_parameters or config.auto_gradients):
        return FixedBudgets()
    gauge = gauge_of(engine.device)
    limit = config.auto_limit
    if limit is None:
        assert isinstance(gauge, DeviceGauge)  # check_limit() has seen to it
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


def check_limit(device: torch.device, config: ZeroSyncConfig) -> None:
    """Raise a ``ValueError`` where a budget of ``config`` sets itself, and nothing says what may be used."""
    for name, is_automatic in (
        ("param_memory_budget", config.auto_parameters), ("grad_memory_budget", config.auto_gradients),
    ):  # fmt: skip
        if is_automatic and config.auto_limit is None and device.type != "cuda":
            raise ValueError(
                f'ZeroSync option {name!r} got "auto" on a device of type {device.type!r}, whose free memory is not'
                ' known. Give a limit: {"auto": "8GiB"}, the resident memory that each rank\'s process may have.'
            )
