"""The report where programs do more than forwards, backwards and steps: its ratio stays that of a plain loop."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import nn
from tqdm import tqdm

from tests.harness.engines import make_engine
from tests.harness.ranks import run_ranks
from zerosync_strategy import StepReport, attach
from zerosync_strategy.core import announcement
from zerosync_strategy.core.announcement import REPORT

WIDTH, LAYERS, BACKWARDS = 64, 3, 2
PERSISTENT = {"stage3_param_persistence_threshold": WIDTH * WIDTH}
ALL = LAYERS * WIDTH * WIDTH * 4 // 2  # bytes that one of two ranks sends to give all parameters once


class Model(nn.Module):
    """Also with what no forward uses, as PEFT's ``modules_to_save`` has it, and frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        self.unused = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.skips = self.reads = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reads:
            x = nn.functional.linear(x, self.layers[1].weight)
        return self.layers[1:](x) if self.skips else self.layers(x)


def train(stage: int, between: Callable[[Any, Any, int], None], steps: int = 5, **options: Any) -> list[StepReport]:
    """Steps of two backwards; ``between(engine, zerosync, step)`` comes before each step's first forward."""
    sharded = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    zero = (sharded if stage == 3 else {}) | options.pop("zero", {})
    model = Model()
    optimizer = options.pop("optimizer", torch.optim.SGD)(trained(model), lr=1e-4)
    engine = make_engine(model, optimizer, stage, zero)
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


def refers(engine: Any, zerosync: Any, step: int) -> None:
    """As DPO to the model without its adapter: modules run in another order, and DeepSpeed records it anew."""
    engine.module.skips = True
    with torch.no_grad():
        engine(torch.ones(1, WIDTH))
    engine.module.skips = False


def reads(engine: Any, *_: Any) -> None:
    """As losses that take the weight of the model's head, and call no module of it."""
    engine.module.reads = True


def refers_to_another(engine: Any, *_: Any, of: Callable[[Any], Any] = lambda reference: reference) -> None:
    """As DPO to a model of its own, and GRPO to one of rewards: an engine that nothing trains."""
    if not hasattr(engine, "reference"):
        zero = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
        engine.reference = make_engine(Model(), None, 3, zero)
    with torch.no_grad():
        of(engine.reference)(torch.ones(1, WIDTH))


def refers_to_a_module_of_another(engine: Any, *_: Any) -> None:
    """As TRL's PPO to the backbone of its reward model, past the engine."""
    refers_to_another(engine, of=lambda reference: reference.module)


def generates(engine: Any, zerosync: Any, step: int) -> None:
    """As GRPO, which gathers the model for it."""
    if step == 3:
        with GatheredParameters(list(engine.module.layers.parameters())), torch.no_grad():
            engine.module(torch.ones(1, WIDTH))


def forwards_twice(engine: Any, zerosync: Any, step: int) -> None:
    engine(torch.ones(1, WIDTH))  # with gradients that no backward uses


@pytest.mark.extended(but=("plain", "held", "a reader"))
@pytest.mark.parametrize(
    ("between", "options"),
    [
        (nothing, {}),
        (nothing, {"param_memory_budget": "all"}),
        (nothing, {"zero": {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}}),
        (nothing, {"zero": PERSISTENT}),  # the first step gathers the unused one
        (refers, {"zero": PERSISTENT}),
        (reads, {}),
        (forwards_twice, {}),
    ],
    ids=[
        "plain",
        "held",
        "released between forward and backward",
        "persistent",
        "persistent, in turns",
        "a reader",
        "a forward more",
    ],
)
def test_the_ratio_holds_for_what_modules_ask_for(between: Any, options: dict[str, Any]) -> None:
    for reports in run_ranks(train, 3, between, **options):
        for report in reports[1:]:
            assert 1.0 <= report.ratio <= 1.02, report
            assert sum(report.apart.values()) < 0.01 * report.floor_bytes, report  # ranks compare the order of modules
    if between is nothing and not options:
        assert reports[-1].floor_bytes == 2 * ALL  # parameters once, and gradients; the unused one is never gathered


@pytest.mark.extended(but=("all",))
@pytest.mark.parametrize("budget", [0, "all"])
def test_what_is_sent_beside_steps_is_counted_apart_and_named(budget: Any, tmp_path: Path) -> None:
    """What engines without ZeroSync gather is DeepSpeed's own, and in no report."""
    sections = {
        saves(tmp_path): "full weights", evaluates: "forwards without gradients", generates: "GatheredParameters",
        refers_to_another: "", refers_to_a_module_of_another: "",
    }  # fmt: skip
    for between, name in sections.items():
        for reports in run_ranks(train, 3, between, param_memory_budget=budget):
            assert all(1.0 <= report.ratio <= 1.02 for report in reports[1:]), reports
            assert budget == 0 or reports[0].ratio < 1.02  # also where an engine is built before the first step
            apart = {report.step - 1: report.apart for report in reports if report.apart}
            if name == "full weights":
                assert apart[3].keys() == {name} and f"for {name}" in str(reports[3])
            elif not name:
                assert apart == {}
            elif budget == 0:  # else they are held, for the step
                assert apart == {3: {name: ALL}} and f"{ALL / 1e3:.4g} kB for {name}" in reports[3].line()


def test_what_the_step_after_a_save_sends_for_it_is_the_checkpoints(tmp_path: Path) -> None:
    """On stages 1 and 2 a step begins in DeepSpeed's layout then."""
    small = {"optimizer": torch.optim.AdamW, "zero": {"reduce_bucket_size": WIDTH * WIDTH}}  # several stripes
    for reports in run_ranks(train, 2, saves(tmp_path), **small):
        assert all(1.0 <= report.ratio <= 1.02 for report in reports), reports
        assert reports[2].apart["checkpoints"] > 1000


def test_every_nth_report_is_printed_by_the_first_rank(tmp_path: Path) -> None:
    """By the options, and by the environment, which goes before them."""
    file, other = tmp_path / "option", tmp_path / "variable"
    run_ranks(train, 2, nothing, report_every=2, report_file=str(file))
    assert [line.split(":")[0] for line in file.read_text().splitlines()] == ["step 2", "step 4"]
    run_ranks(train, 2, nothing, report_every=2, report_file=str(file), env={REPORT: f"5:{other}"})
    assert len(file.read_text().splitlines()) == 2
    (line,) = other.read_text().splitlines()
    assert line.startswith("step 5: 2 backwards, 1 reduction; sent 49.2 kB, 1.001 x the minimum; up to ")
    for outcome in run_ranks(train, 2, nothing, env={REPORT: "often"}, expect="any"):
        assert outcome.error == "ValueError" and "ZEROSYNC_REPORT takes a number" in outcome.message


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(x)


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize(
    ("stage", "options"), [(2, {}), (3, {}), (3, {"param_memory_budget": "all"})], ids=["2", "3", "3, held"]
)
def test_each_of_several_engines_has_its_own_bytes_backwards_and_name(
    stage: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """A GAN: the gradients that the generator's loss gives the critic are dropped."""
    file = tmp_path / "reports"

    def run() -> list[list[StepReport]]:
        zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
        made = Model(), Critic(), Critic()
        engines = [make_engine(each, torch.optim.SGD(trained(each), lr=1e-4), stage, zero) for each in made]
        generator, *critics = engines
        handles = [attach(engine, report_every=3, report_file=str(file), **options) for engine in engines]
        reports = []
        for _ in range(4):
            for critic in critics:
                critic.zero_grad()
                fake = generator(torch.ones(2, WIDTH))
                critic.backward(critic(fake.detach()).mean())
                critic.step()
            generator.backward(sum(critic(generator(torch.ones(2, WIDTH))).mean() for critic in critics))
            generator.step()
            reports.append([handle.report for handle in handles])
        return reports

    # The generator's backward comes before the critic's own from the second window on, which surprises that window.
    for reports in run_ranks(run)[0][2:]:
        for report in reports:
            assert report.backwards == 1 and report.floor_bytes <= report.bytes_sent, report
            assert report.bytes_sent < 1.02 * report.floor_bytes, report
    names = [line.split(":")[0] for line in file.read_text().splitlines()]
    assert names == ["Critic 1", "Critic 2", "Model"]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def test_a_line_stands_above_a_progress_bar(capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(announcement, "_logger", logging.Logger("of this test"))
    with tqdm(total=2, file=sys.stdout) as bar:
        bar.update()
        announcement.say("step 1: sent")
        announcement.say("step 2: sent")
        print(end="", file=sys.stderr, flush=True)
    written = capfd.readouterr()
    assert written.err == "ZeroSync: step 1: sent\nZeroSync: step 2: sent\n"
    assert written.out.count("\r") >= 4  # the bar was taken away before each of them
