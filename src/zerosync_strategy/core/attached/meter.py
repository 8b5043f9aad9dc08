"""Reports each optimizer step: the bytes sent, the minimum, and the peaks of memory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from zerosync_strategy.core.announcement import REPORT, say
from zerosync_strategy.core.attached.budgets import AutomaticBudgets
from zerosync_strategy.core.attached.stage import EngineParts
from zerosync_strategy.core.comm.nodes import Sent
from zerosync_strategy.core.failures.rank_state import Cause, Departure
from zerosync_strategy.core.params.module_parameters import ModuleParameters
from zerosync_strategy.core.report import StepReport, size_text

_PEAKS = ("peak_unsharded_bytes", "peak_held_bytes", "peak_node_bytes", "peak_host_bytes", "loaded_bytes")


class PrintedReports:
    """Logs a one-line report after every ``every`` optimizer steps, or appends it to a file. For one rank.

    ``every`` is 0 where nobody asks for reports; :meth:`note` is not called then.
    """

    def __init__(self, every: int, file: str | None) -> None:
        if said := os.environ.get(REPORT):
            number, _, path = said.partition(":")
            if not number.isdecimal():
                raise ValueError(f"{REPORT} takes a number of optimizer steps, or with a file N:FILE, got {said!r}.")
            every, file = int(number), path or file
        self.every, self._file = every, file

    def note(self, report: StepReport, label: Callable[[], str]) -> None:
        """Log ``report``, if its turn has come; ``label`` returns what names the engine."""
        if report.step % self.every:
            return
        line = report.line(label())
        if self._file is None:
            say(line)
            return
        with open(self._file, "a") as lines:
            lines.write(f"{line}\n")


class StepMeter:
    """Makes a report of each optimizer step of one engine, and lets automatic budgets measure it.

    It also reports the engine's progress, even to another thread (``failures/rank_state.py``).

    Attributes:
        budgets: the automatic ones; ``None``: no budget is automatic.
        parameter_bytes: by parameter, the least that a rank must send to give it to all ranks once; ``all_once``: the
            sum.
    """

    def __init__(
        self, parts: EngineParts, of_module: ModuleParameters | None, budgets: AutomaticBudgets | None
    ) -> None:
        self._parts, self._of_module, self.budgets, self._counts_gathers = parts, of_module, budgets, True
        self.steps = 0
        self.report: StepReport | None = None
        self.parameter_bytes = parts.reducer.shards.parameters_floor()
        self.all_once = Sent(*map(sum, zip(*self.parameter_bytes.values(), strict=True)))

    def step_done(self) -> StepReport:
        """Return the report of the optimizer step, and reset the counts."""
        window, counter, reducer = self._parts.window, self._parts.counter, self._parts.reducer
        self.steps += 1
        of_module = self._of_module
        needed = self.all_once
        if of_module is not None:
            needed = of_module.cache.plan.needed(self.parameter_bytes) if self._counts_gathers else Sent()
        floor = reducer.pipeline.sent_floor.plus(needed)
        observed: dict[str, Any] = {}
        for observer in reducer.observers:
            observed |= observer.report()
        self.report = report = StepReport(
            step=self.steps,
            backwards=window.backwards,
            reductions=window.reductions,
            early_reductions=window.early_reductions,
            floor_bytes=floor.nbytes,
            floor_bytes_between_nodes=floor.between,
            peak_unreduced_bytes=reducer.local.peak_bytes,
            seconds=window.seconds,
            collectives=counter.take(),
            copied_bytes=0 if self._parts.copies is None else self._parts.copies.nbytes,
            apart=counter.take_apart(),
            budgets=None if self.budgets is None else self.budgets.choice,
            **(dict.fromkeys(_PEAKS, 0) if of_module is None else _peaks(of_module)),
            **observed,
        )
        window.end_step()
        if of_module is not None:
            of_module.cache.end_window(self.parameter_bytes)  # all that the step has resharded
            of_module.scheduler.issuing.unsharded.reset_peak()
        if self.budgets is not None:
            self.budgets.step_ended()
        return report

    def compiling(self) -> None:
        """Stop counting gathers: DeepCompile's graphs do not count them."""
        self._counts_gathers = False

    def memory(self) -> str:
        """Return in words what this engine has held since the last step, and which options lower it; for an error."""
        held = [f"{size_text(self._parts.reducer.local.peak_bytes)} of unreduced gradients (coalesce=False, or a"]
        held[0] += " grad_memory_budget, lets less stay)"
        if self._of_module is not None:
            peak = self._of_module.scheduler.issuing.unsharded.peak
            held.append(f"{size_text(peak)} of gathered parameters (param_memory_budget holds less)")
        return f"Since the last step, ZeroSync has held up to {' and '.join(held)}."

    # ---- progress of the engine ----------------------------------------------------------------------------------

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
        return None if self._of_module is None else self._of_module.scheduler.departure()

    def name_of(self, module: torch.nn.Module) -> str:
        own = self._parts.engine.module
        if module is own:
            return type(module).__name__
        return next((name for name, each in own.named_modules() if each is module), "")


def _peaks(of_module: ModuleParameters) -> dict[str, Any]:
    """Return bytes of gathered parameters, by attribute of :class:`StepReport`."""
    plan = of_module.cache.plan
    host, shards = plan.host, plan.node_shards
    of_host = (0, 0) if host is None else (host.peak_bytes, host.loaded_bytes)
    node = 0 if shards is None else shards.peak_bytes
    return dict(zip(_PEAKS, (of_module.scheduler.issuing.unsharded.peak, plan.peak_bytes, node, *of_host), strict=True))


def label_of(engine: Any, attached: Iterable[Any]) -> str:
    """Return the class of the module of ``engine``, one of ``attached``; empty if it is the only one.

    For engines over one module, return the attributes that hold what it trains. Equal names get a number.
    """
    engines = sorted(attached, key=lambda each: each.number)
    if len(engines) < 2:
        return ""
    labels = [_label(each, engines) for each in engines]
    own = labels[engines.index(engine)]
    if Counter(labels)[own] == 1:
        return own
    return f"{own} {1 + [each for each, label in zip(engines, labels, strict=True) if label == own].index(engine)}"


def _label(engine: Any, engines: Iterable[Any]) -> str:
    if all(each is engine or each.parts.names.keys().isdisjoint(engine.parts.names) for each in engines):
        return type(engine.parts.engine.module).__name__
    return ", ".join(
        dict.fromkeys(engine.parts.names[param].partition(".")[0] for param in engine.parts.reducer.params)
    )
