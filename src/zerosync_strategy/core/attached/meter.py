"""The measure of each optimizer step: what it sent, what it had to send, and the peaks of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from zerosync_strategy.core.announcement import PrintedReports
from zerosync_strategy.core.attached.parameters import Parts
from zerosync_strategy.core.budgets.automatic import AutomaticBudgets
from zerosync_strategy.core.comm.nodes import Sent
from zerosync_strategy.core.failures.doing import Cause, Departure
from zerosync_strategy.core.params.cache import ParameterCache
from zerosync_strategy.core.params.scheduler import GatherScheduler
from zerosync_strategy.core.report import StepReport

_PEAKS = ("peak_unsharded_bytes", "peak_held_bytes", "peak_node_bytes", "peak_host_bytes", "loaded_bytes")


class GatherMeter:
    """Of the units of ZeRO-3: what they had to gather, and the peaks of its memory."""

    def __init__(self, scheduler: GatherScheduler, cache: ParameterCache) -> None:
        self.scheduler, self.cache = scheduler, cache

    def floor(self, parameter_bytes: Mapping[Any, Sent]) -> Sent:
        """Return what this rank had to send to gather parameters, for a window and its step, and count from zero."""
        nbytes = between = 0
        for param, sent in parameter_bytes.items():
            gathers, crossings = self.cache.plan.gathers_in(param._zerosync_record)
            param._zerosync_record.gathers = 0
            nbytes += gathers * (sent.nbytes - sent.between) + crossings * sent.between
            between += crossings * sent.between
        return Sent(nbytes, between)

    def peaks(self) -> dict[str, Any]:
        """Return bytes of gathered parameters, by attribute of :class:`StepReport`."""
        plan = self.cache.plan
        host, shards = plan.host, plan.node_shards
        of_host = (0, 0) if host is None else (host.peak_bytes, host.loaded_bytes)
        node = 0 if shards is None else shards.peak_bytes
        return dict(zip(_PEAKS, (self.scheduler.issuing.unsharded.peak, plan.peak_bytes, node, *of_host), strict=True))

    def end_window(self, parameter_bytes: Mapping[Any, Sent]) -> None:
        self.cache.end_window(parameter_bytes)  # all that the step has released
        self.scheduler.issuing.unsharded.reset_peak()


class StepMeter:
    """Makes a report of each optimizer step of one engine, prints it, and lets budgets choose by it.

    It also says how far the engine has come: it implements :class:`~failures.rank_state.Progress`.

    Attributes:
        parameter_bytes: by parameter, what one rank must send to give it to all ranks once.
    """

    def __init__(
        self, parts: Parts, gathers: GatherMeter | None, budgets: AutomaticBudgets | None,
        reports: PrintedReports | None, label: Callable[[], str],
    ) -> None:  # fmt: skip
        self._parts, self._gathers, self._counts_gathers = parts, gathers, True
        self._budgets, self._reports, self._label = budgets, reports, label
        self.steps = 0
        self.report: StepReport | None = None
        self.parameter_bytes = parts.reducer.shards.parameters_floor()
        self._all_once = Sent(*map(sum, zip(*self.parameter_bytes.values(), strict=True)))

    @property
    def all_parameters_bytes(self) -> int:
        """What one rank must send to give all parameters to all ranks once."""
        return self._all_once.nbytes

    def forward_ended(self) -> None:
        if self._budgets is not None:
            self._budgets.forward_ended()

    def step_begins(self) -> None:
        if self._budgets is not None:
            self._budgets.step_begins()

    def step_done(self) -> None:
        """An optimizer step has been taken: make its report, print it where it is due, and count from zero."""
        window, traffic, reducer = self._parts.window, self._parts.traffic, self._parts.reducer
        self.steps += 1
        traffic.enter(None)
        gathers = self._gathers
        needed = self._all_once
        if gathers is not None:
            needed = gathers.floor(self.parameter_bytes) if self._counts_gathers else Sent()
        floor = reducer.pipeline.sent_floor.plus(needed)
        self.report = report = StepReport(
            step=self.steps,
            backwards=window.backwards,
            reductions=window.reductions,
            early_reductions=window.early_reductions,
            floor_bytes=floor.nbytes,
            floor_bytes_between_nodes=floor.between,
            peak_unreduced_bytes=reducer.local.peak_bytes,
            seconds=window.seconds,
            collectives=traffic.take(),
            apart=traffic.take_apart(),
            budgets=None if self._budgets is None else self._budgets.choice,
            **(dict.fromkeys(_PEAKS, 0) if gathers is None else gathers.peaks()),
        )
        window.end_step()
        if gathers is not None:
            gathers.end_window(self.parameter_bytes)
        if self._reports is not None:
            self._reports.note(report.step, lambda: report.line(self._label()))
        if self._budgets is not None:
            self._budgets.step_ended()

    def compiling(self) -> None:
        """DeepCompile's graphs count no gathers."""
        self._counts_gathers = False

    # ---- how far the engine has come -----------------------------------------------------------------------------

    @property
    def backwards(self) -> int:
        return self._parts.window.backwards or self._parts.window.dropped

    def departure(self, in_forward: bool, in_step: bool) -> Departure | None:
        if self.report is None:
            return None
        made, before = self.backwards, self.report.backwards
        text = ""
        if in_step and made not in (0, before):
            text = f"steps after {made} backward(s), and did after {before} in the window before"
        elif in_forward and made == before:
            text = f"goes on to backward {made + 1}, and stepped after {before} in the window before"
        if text:
            return Departure(Cause.OTHER_BACKWARDS, text)
        return None if self._gathers is None else self._gathers.scheduler.departure()

    def name_of(self, module: torch.nn.Module) -> str:
        own = self._parts.engine.module
        if module is own:
            return type(module).__name__
        return next((name for name, each in own.named_modules() if each is module), "")
