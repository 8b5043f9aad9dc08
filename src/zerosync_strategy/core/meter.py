"""The measure of each optimizer step: what it sent, what it had to send, and the peaks of memory."""

from __future__ import annotations

from zerosync_strategy.core.budgets.automatic import Choice
from zerosync_strategy.core.comm.traffic import EngineCounter
from zerosync_strategy.core.gradients.reducer import Reducer
from zerosync_strategy.core.gradients.window import Window
from zerosync_strategy.core.params.cache import ParameterCache
from zerosync_strategy.core.params.scheduler import GatherScheduler
from zerosync_strategy.core.report import StepReport


class StepMeter:
    """Makes a report of each optimizer step of one engine.

    Args:
        traffic: counts what the engine sends.
        window, reducer: of the engine.
        scheduler, cache: of ZeRO-3.

    Attributes:
        steps: optimizer steps since the engine was attached.
        report: of the last step; ``None`` before the first.
        parameter_bytes: by parameter, what one rank must send to give it to all ranks once.
        counts_gathers: the gathers go through what counts; not so in DeepCompile's graphs.
    """

    def __init__(
        self,
        traffic: EngineCounter,
        window: Window,
        reducer: Reducer,
        scheduler: GatherScheduler | None,
        cache: ParameterCache | None,
    ) -> None:
        self._traffic = traffic
        self._window = window
        self._reducer = reducer
        self._scheduler = scheduler
        self._cache = cache
        self.steps = 0
        self.report: StepReport | None = None
        self.parameter_bytes = reducer.parameters_floor()
        self.counts_gathers = True

    def step_done(self, budgets: Choice | None) -> None:
        """An optimizer step has been taken, with these automatic budgets: make its report, and count from zero."""
        window = self._window
        host = None if self._cache is None else self._cache.host
        self.steps += 1
        self.report = StepReport(
            step=self.steps,
            backwards=window.backwards,
            reductions=window.reductions,
            early_reductions=window.early_reductions,
            floor_bytes=self._floor(window.backwards),
            peak_unreduced_bytes=self._reducer.local.peak_bytes,
            peak_unsharded_bytes=self._scheduler.unsharded.peak if self._scheduler is not None else 0,
            peak_held_bytes=self._cache.peak_bytes if self._cache is not None else 0,
            peak_host_bytes=host.peak_bytes if host is not None else 0,
            loaded_bytes=host.loaded_bytes if host is not None else 0,
            seconds=window.seconds,
            collectives=self._traffic.take(),
            budgets=budgets,
        )
        window.end_step()
        if self._cache is not None:
            self._cache.end_window(self.parameter_bytes)  # all that the step has released
        if self._scheduler is not None:
            self._scheduler.unsharded.end_window()

    def _floor(self, backwards: int) -> int:
        floor = self._reducer.sent_floor
        if not self.counts_gathers:
            return floor
        for param, nbytes in self.parameter_bytes.items():
            floor += nbytes if self._cache is None else nbytes * self._cache.gathers_in(param, backwards)
        return floor
