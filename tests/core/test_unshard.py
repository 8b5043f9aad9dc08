"""ZeRO-3 parameters held over the window: fewer bytes, the same result, within the budget."""

import tempfile
import warnings
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.harness import engines
from tests.harness.data import noise
from tests.harness.engines import rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from tests.harness.releases import since
from zerosync_strategy import attach
from zerosync_strategy.core.engine.parameter import record_of

LAYERS, WIDTH, BACKWARDS = 4, 32, 4
LAYER_BYTES = WIDTH * WIDTH * 4


class Model(nn.Module):
    """Equal layers, of which the first runs twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = torch.tanh(layer(x))
        return x.square().mean()


data = noise(4, WIDTH)


def make_engine(reuse: int = 0, model: nn.Module | None = None) -> Any:
    model = model or Model()
    zero = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": reuse}
    return engines.make_engine(model, torch.optim.AdamW(model.parameters(), lr=0.01), zero=zero)


def train(engine: Any, steps: int, between: Any = lambda: None) -> None:
    for k in range(steps * BACKWARDS):
        engine.backward(engine(data(k, rank())) / BACKWARDS)
        between()
        if (k + 1) % BACKWARDS == 0:
            engine.step()


def oracle(steps: int) -> dict[str, torch.Tensor]:
    model = Model()
    plain = Oracle(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return plain.train(lambda model, k, rank: model(data(k, rank)) / BACKWARDS, steps, BACKWARDS)


@pytest.mark.off_device("it counts messages of gloo")
def test_all_parameters_held_reach_the_floor() -> None:
    def run() -> Any:
        engine = make_engine()
        zerosync = attach(engine, param_memory_budget="all")
        train(engine, 3)
        report = zerosync.report
        zerosync.detach()
        assert engine.optimizer.parameter_offload.forward_hooks
        return distance(full_parameters(engine.module), oracle(3)), report

    error, report = run_ranks(run)[0]
    size = LAYERS * LAYER_BYTES
    assert error == 0.0
    assert report.floor_bytes == size  # half of the parameters and half of the gradients
    assert report.ratio < 1.01 and report.peak_held_bytes == size
    assert report.collectives["isend"].bytes == size  # to the other rank, as much of each


@pytest.mark.extended
def test_the_next_engine_of_a_module_gathers_alike() -> None:
    """DeepSpeed keeps functions on the modules, by which backwards would gather and release for the engine before."""

    def run() -> Any:
        model, sent = Model(), []
        for _ in range(2):
            engine = make_engine(model=model)
            zerosync = attach(engine, param_memory_budget=2 * LAYER_BYTES)
            train(engine, 3)
            sent.append(zerosync.report.collectives)
            engine.destroy()
        return sent

    for first, second in run_ranks(run):
        assert first == second


@pytest.mark.extended
@since("0.19.3", "a first module stays gathered from its backward on, and others are gathered more")
def test_within_a_budget_the_most_gathered_are_held() -> None:
    def run(budget: int | str) -> Any:
        engine = make_engine()
        zerosync = attach(engine, param_memory_budget=budget)
        train(engine, 3)
        held = [index for index, layer in enumerate(engine.module.layers) if record_of(layer.weight).hold]
        return distance(full_parameters(engine.module), oracle(3)), held, zerosync.report

    results = {budget: run_ranks(run, budget)[0] for budget in (0, "6KB", 2 * LAYER_BYTES)}
    assert [error for error, _, _ in results.values()] == [0.0] * 3
    assert [held for _, held, _ in results.values()] == [[], [0], [0, 1]]
    reports = [report for _, _, report in results.values()]
    assert [report.peak_held_bytes for report in reports] == [0, LAYER_BYTES, 2 * LAYER_BYTES]
    sent = [report.bytes_sent for report in reports]
    assert sent[0] > sent[1] > sent[2]


@pytest.mark.extended
@pytest.mark.parametrize("budget", [0, "all"])
def test_others_may_gather_evaluate_and_save_in_mid_window(budget: Any) -> None:
    def run() -> float:
        engine = make_engine()
        attach(engine, param_memory_budget=budget)

        def between() -> None:
            full_parameters(engine.module)
            engine.eval()
            with torch.no_grad():
                engine(data(0, 0))
            engine.train()

        train(engine, 2, between)
        return distance(full_parameters(engine.module), oracle(2))

    assert run_ranks(run) == [0.0, 0.0]


class Odd(Model):
    """Layers that are run again in the backward, read elsewhere, gathered by hand, and one that is not always run."""

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        first, second, third, last = self.layers
        x = checkpoint(first, x, use_reentrant=True)
        x = checkpoint(second, torch.tanh(x), use_reentrant=False)
        x = nn.functional.linear(x, first.weight)  # another module's
        if not skip:
            with deepspeed.zero.GatheredParameters([third.weight], enabled=hasattr(third.weight, "ds_id")):
                x = torch.tanh(third(x))
        return last(x).square().mean()


@pytest.mark.extended(but=("8192-True",))
@pytest.mark.parametrize(("budget", "eager_frames"), [("all", True), ("all", False), (2 * LAYER_BYTES, True)])
def test_what_others_release_is_there_for_the_backward(budget: Any, eager_frames: bool) -> None:
    def data_of(k: int, rank: int) -> torch.Tensor:
        return data(k, rank).requires_grad_()  # for the reentrant checkpoint

    def ours(directory: str) -> float:
        model = Odd()
        zero = {"stage3_param_persistence_threshold": 0}
        engine = engines.make_engine(model, torch.optim.AdamW(model.parameters(), lr=0.01), zero=zero)
        attach(engine, param_memory_budget=budget, eager_frames=eager_frames)
        for k in range(12):
            loss = engine(data_of(k, rank()), skip=k % 3 == 1)
            if k % 4 == 1:
                full_parameters(engine.module)  # releases
            if k % 4 == 2:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    engine.save_checkpoint(directory)
            if k % 4 == 3:
                with pytest.raises(RuntimeError, match="mat1 and mat2"):
                    engine(torch.ones(1, WIDTH + 1))
                loss = engine(data_of(k, rank()), skip=k % 3 == 1)
            engine.backward(loss / 4)
            if k % 4 == 3:
                engine.step()
        return distance(full_parameters(engine.module), oracle_parameters)

    model = Odd()
    plain = Oracle(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    plain.train(lambda model, k, rank: model(data_of(k, rank), skip=k % 3 == 1) / 4, 3, 4)
    oracle_parameters = full_parameters(model)
    with tempfile.TemporaryDirectory() as directory:
        assert run_ranks(ours, directory) == [0.0, 0.0]


@pytest.mark.extended
def test_an_early_evaluation_costs_no_gathers_later() -> None:
    def run(evaluate: bool) -> int:
        engine = make_engine(reuse=10**9)
        zerosync = attach(engine)
        if evaluate:
            engine.eval()
            with torch.no_grad():
                engine(data(0, 0))
                engine(data(0, 0))
            engine.train()
        train(engine, 4)
        return zerosync.report.bytes_sent

    assert run_ranks(run, True) == run_ranks(run, False)


def test_only_for_stage_3() -> None:
    def run() -> None:
        model = Model()
        engine = engines.make_engine(model, torch.optim.AdamW(model.parameters()), stage=2)
        with pytest.raises(ValueError, match=r"'param_memory_budget' holds .* stage 3, found stage 2"):
            attach(engine, param_memory_budget="1MB")
        zerosync = attach(engine, param_memory_budget="0MB")
        with pytest.raises(ValueError, match="for ZeRO stage 3, found stage 2"):
            zerosync.full_state()

    run_ranks(run)
