"""How far an attached engine has come, for the verdict of an error."""

from __future__ import annotations

import torch

from zerosync_strategy.core.gradients.window import Window
from zerosync_strategy.core.meter import StepMeter
from zerosync_strategy.core.params.scheduler import GatherScheduler


class EngineProgress:
    """Implements :class:`~failures.observation.Progress`.

    Args:
        module: of the engine.
        meter, window, scheduler: of the engine.
    """

    def __init__(
        self, module: torch.nn.Module, meter: StepMeter, window: Window, scheduler: GatherScheduler | None
    ) -> None:
        self._module, self._meter, self._window, self._scheduler = module, meter, window, scheduler

    @property
    def steps(self) -> int:
        return self._meter.steps

    @property
    def backwards(self) -> int:
        return self._window.backwards or self._window.dropped

    def departure(self, in_forward: bool, in_step: bool) -> str:
        report = self._meter.report
        if report is None:
            return ""
        made, before = self.backwards, report.backwards
        if in_step and made not in (0, before):
            return f"steps after {made} backward(s), and did after {before} in the window before"
        if in_forward and made == before:
            return f"goes on to backward {made + 1}, and stepped after {before} in the window before"
        return self._scheduler.departure() if self._scheduler is not None else ""

    def name_of(self, module: torch.nn.Module) -> str:
        if module is self._module:
            return type(module).__name__
        return next((name for name, each in self._module.named_modules() if each is module), "")
