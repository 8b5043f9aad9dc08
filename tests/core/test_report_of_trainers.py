"""The report where programs do more than forwards, backwards and steps: its ratio stays that of a plain loop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.engines import make_engine
from tests.harness.ranks import run_ranks
from zerosync_strategy import StepReport, attach
from zerosync_strategy.core.announcement import REPORT

WIDTH, LAYERS, BACKWARDS = 64, 3, 2
ALL = LAYERS * WIDTH * WIDTH * 4 // 2  # bytes that one of two ranks sends to give all parameters once


class Model(nn.Module):
    """Also with what no forward uses, as PEFT's ``modules_to_save`` has it, and frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        self.unused = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def train(stage: int, between: Callable[[Any, Any, int], None], steps: int = 5, **options: Any) -> list[StepReport]:
    """Steps of two backwards; ``between(engine, zerosync, step)`` comes before each step's first forward."""
    zero = options.pop("zero", {}) | {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    model = Model()
    trained = [param for param in model.parameters() if param.requires_grad]
    engine = make_engine(model, torch.optim.SGD(trained, lr=1e-4), stage, zero if stage == 3 else {})
    zerosync = attach(engine, **options)
    reports = []
    for step in range(steps):
        between(engine, zerosync, step)
        for _ in range(BACKWARDS):
            engine.backward(engine(torch.ones(1, WIDTH)).sum())
        engine.step()
        reports.append(zerosync.report)
    return reports


def nothing(*_: Any) -> None:
    pass


def saves(folder: Path) -> Callable[[Any, Any, int], None]:
    def between(engine: Any, zerosync: Any, step: int) -> None:
        if step == 2:
            engine.save_checkpoint(str(folder))
        if step == 3:
            zerosync.export(folder / "weights")

    return between


def evaluates(engine: Any, zerosync: Any, step: int) -> None:
    if step == 3:
        engine.eval()
        with torch.no_grad():
            engine(torch.ones(1, WIDTH))
        engine.train()


def forwards_twice(engine: Any, zerosync: Any, step: int) -> None:
    engine(torch.ones(1, WIDTH))  # with gradients that no backward uses


@pytest.mark.parametrize(
    ("between", "options"),
    [
        (nothing, {}),
        (nothing, {"param_memory_budget": "all"}),
        (nothing, {"zero": {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}}),
        (forwards_twice, {}),
    ],
    ids=["plain", "held", "released between forward and backward", "a forward more"],
)
def test_the_ratio_holds_for_what_modules_ask_for(between: Any, options: dict[str, Any]) -> None:
    for reports in run_ranks(train, 3, between, **options):
        for report in reports[1:]:
            assert 0.98 <= report.ratio <= 1.02 and not report.apart, report
    if between is nothing and not options:
        assert reports[-1].floor_bytes == (BACKWARDS + 1) * ALL  # the unused one is never gathered


@pytest.mark.parametrize("budget", [0, "all"])
def test_what_is_sent_beside_steps_is_counted_apart_and_named(budget: Any, tmp_path: Path) -> None:
    for between, step, name in ((saves(tmp_path), 3, "full weights"), (evaluates, 3, "forwards without gradients")):
        for reports in run_ranks(train, 3, between, param_memory_budget=budget):
            assert all(0.98 <= report.ratio <= 1.02 for report in reports[1:]), reports
            apart = {report.step - 1: report.apart for report in reports if report.apart}
            if name == "full weights":
                assert apart[step].keys() == {name} and f"for {name}" in str(reports[step])
            elif budget == 0:  # else they are held, for the step
                assert apart == {step: {name: ALL}} and f"{ALL / 1e3:.4g} kB for {name}" in reports[step].line()


def test_every_nth_report_is_printed_by_the_first_rank(tmp_path: Path) -> None:
    """By the options, and by the environment, which goes before them."""
    file, other = tmp_path / "option", tmp_path / "variable"
    run_ranks(train, 2, nothing, report_every=2, report_file=str(file))
    assert [line.split(":")[0] for line in file.read_text().splitlines()] == ["step 2", "step 4"]
    run_ranks(train, 2, nothing, report_every=2, report_file=str(file), env={REPORT: f"5:{other}"})
    assert len(file.read_text().splitlines()) == 2
    (line,) = other.read_text().splitlines()
    assert line.startswith("step 5: 2 backwards, 1 reduction; sent 49.16 kB, 1.000 x the minimum; up to ")
    (outcome, _) = run_ranks(train, 2, nothing, env={REPORT: "often"}, expect="any")
    assert outcome.error == "ValueError" and "ZEROSYNC_REPORT takes a number" in outcome.message
