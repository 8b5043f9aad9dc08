"""The measure of each optimizer step: what it sent, what it had to send, and the peaks of memory."""

from __future__ import annotations

from typing import Any

import torch

from zerosync_strategy.core.budgets.automatic import Choice
from zerosync_strategy.core.comm.nodes import Sent
from zerosync_strategy.core.comm.traffic import EngineCounter
from zerosync_strategy.core.failures.doing import Cause, Departure
from zerosync_strategy.core.gradients.reducer import Reducer
from zerosync_strategy.core.gradients.window import Window
from zerosync_strategy.core.params.cache import ParameterCache
from zerosync_strategy.core.params.scheduler import GatherScheduler
from zerosync_strategy.core.report import StepReport


class StepMeter:
    """Makes a report of each optimizer step of one engine, and says how far the engine has come.

    Implements :class:`~failures.rank_state.Progress`.

    Attributes:
        parameter_bytes: by parameter, what one rank must send to give it to all ranks once.
    """

    def __init__(self, module: torch.nn.Module, traffic: EngineCounter, window: Window, reducer: Reducer) -> None:
        self._module, self._traffic, self._window, self._reducer = module, traffic, window, reducer
        self.steps = 0
        self.report: StepReport | None = None
        self.parameter_bytes = reducer.parameters_floor()
        self._all_once = Sent(*map(sum, zip(*self.parameter_bytes.values(), strict=True)))

    @property
    def all_parameters_bytes(self) -> int:
        """What one rank must send to give all parameters to all ranks once."""
        return self._all_once.nbytes

    def step_done(self, budgets: Choice | None) -> StepReport:
        """An optimizer step has been taken, with these automatic budgets: return its report, and count from zero."""
        window = self._window
        self.steps += 1
        self._traffic.enter(None)
        floor = self._reducer.pipeline.sent_floor.plus(self._gathers_floor())
        self.report = report = StepReport(
            step=self.steps,
            backwards=window.backwards,
            reductions=window.reductions,
            early_reductions=window.early_reductions,
            floor_bytes=floor.nbytes,
            floor_bytes_between_nodes=floor.between,
            peak_unreduced_bytes=self._reducer.local.peak_bytes,
            seconds=window.seconds,
            collectives=self._traffic.take(),
            apart=self._traffic.take_apart(),
            budgets=budgets,
            **self._parameter_peaks(),
        )
        window.end_step()
        return report

    def _gathers_floor(self) -> Sent:
        """Return what this rank must send to gather parameters, for a window and its step."""
        return self._all_once

    def _parameter_peaks(self) -> dict[str, Any]:
        """Return bytes of gathered parameters, by attribute of :class:`StepReport`."""
        return {"peak_unsharded_bytes": 0, "peak_held_bytes": 0, "peak_host_bytes": 0, "loaded_bytes": 0}

    # ---- how far the engine has come -----------------------------------------------------------------------------

    @property
    def backwards(self) -> int:
        return self._window.backwards or self._window.dropped

    def departure(self, in_forward: bool, in_step: bool) -> Departure | None:
        if self.report is None:
            return None
        made, before = self.backwards, self.report.backwards
        text = ""
        if in_step and made not in (0, before):
            text = f"steps after {made} backward(s), and did after {before} in the window before"
        elif in_forward and made == before:
            text = f"goes on to backward {made + 1}, and stepped after {before} in the window before"
        return Departure(Cause.OTHER_BACKWARDS, text) if text else None

    def name_of(self, module: torch.nn.Module) -> str:
        if module is self._module:
            return type(module).__name__
        return next((name for name, each in self._module.named_modules() if each is module), "")


class Stage3Meter(StepMeter):
    """The meter of a ZeRO-3 engine, whose modules gather parameters; DeepCompile's graphs count no gathers."""

    def __init__(
        self, module: torch.nn.Module, traffic: EngineCounter, window: Window, reducer: Reducer,
        scheduler: GatherScheduler, cache: ParameterCache,
    ) -> None:  # fmt: skip
        super().__init__(module, traffic, window, reducer)
        self._scheduler = scheduler
        self._cache = cache
        self.counts_gathers = True

    def step_done(self, budgets: Choice | None) -> StepReport:
        report = super().step_done(budgets)
        self._cache.end_window(self.parameter_bytes)  # all that the step has released
        self._scheduler.issuing.unsharded.reset_peak()
        return report

    def _gathers_floor(self) -> Sent:
        if not self.counts_gathers:
            return Sent()
        nbytes = between = 0
        for param, sent in self.parameter_bytes.items():
            gathers, crossings = self._cache.plan.gathers_in(param._zerosync_record)
            param._zerosync_record.gathers = 0
            nbytes += gathers * (sent.nbytes - sent.between) + crossings * sent.between
            between += crossings * sent.between
        return Sent(nbytes, between)

    def _parameter_peaks(self) -> dict[str, Any]:
        host, shards = self._cache.plan.host, self._cache.plan.node_shards
        return {
            "peak_unsharded_bytes": self._scheduler.issuing.unsharded.peak,
            "peak_held_bytes": self._cache.plan.peak_bytes,
            "peak_node_bytes": 0 if shards is None else shards.peak_bytes,
            "peak_host_bytes": 0 if host is None else host.peak_bytes,
            "loaded_bytes": 0 if host is None else host.loaded_bytes,
        }

    def departure(self, in_forward: bool, in_step: bool) -> Departure | None:
        if self.report is None:
            return None
        return super().departure(in_forward, in_step) or self._scheduler.departure()
