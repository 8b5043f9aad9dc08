"""Parameters that are frozen and thawed while an engine trains (N1)."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.data import noise
from tests.harness.engines import make_engine, rank
from tests.harness.extended import STAGES
from tests.harness.networks import two_layers
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.comm import nodes

data = noise(4, 6)


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_that_was_frozen_when_the_engine_was_built(stage: int) -> None:
    """DeepSpeed has no place for its gradient, and would never train it, silently."""

    def run() -> None:
        net = two_layers()
        net[0].requires_grad_(False)
        engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=0.5), stage)
        attach(engine)

        def backward(raw: bool) -> None:
            loss = engine(data(0, rank())).square().mean()
            loss.backward() if raw else engine.backward(loss)

        backward(raw=False)
        engine.step()
        net[0].requires_grad_(True)
        for raw in (False, True):
            with pytest.raises(RuntimeError, match=r"'0.weight', '0.bias' required no gradient when .* anew when"):
                backward(raw)
        engine.zero_grad()
        net[0].requires_grad_(False)
        backward(raw=False)
        engine.step()

    run_ranks(run)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.03, weight_decay=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "no state": lambda params: torch.optim.SGD(params, lr=0.2),
}
# The steps at which each layer is frozen; between those of two layers, and while others are.
FROZEN: dict[int, set[int]] = {0: {0, 1, 2, 6}, 1: {4, 5}, 2: {0, 1, 2, 3, 4}}


@pytest.mark.extended(but=("3-no state-options6",))
@pytest.mark.parametrize(
    ("stage", "optimizer", "options"),
    [
        (1, "adamw", {}), (2, "adamw", {}), (3, "adamw", {}), (2, "momentum", {}), (3, "momentum", {}),
        (2, "no state", {}), (3, "no state", {}), (1, "nadam", {}), (3, "nadam", {}),
        (2, "adamw", {"bf16": {"enabled": True}}),
        (2, "adamw", {"zero": {"offload_optimizer": {"device": "cpu"}}}),
        (3, "adamw", {"zero": {"offload_optimizer": {"device": "cpu"}}}),
        (3, "adamw", {"zero": {"sub_group_size": 60, "stage3_param_persistence_threshold": 0}}),
    ],
)  # fmt: skip
def test_parameters_that_are_frozen_for_some_steps(
    stage: int, optimizer: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They require a gradient while the engine is built, as the error above says. No step moves what is frozen."""
    monkeypatch.setattr(nodes, "WITHIN_HOST", nodes.MessageSizes(200, 2))  # several pieces to step
    half = "bf16" in options

    def layers(net: Any) -> list[nn.Module]:
        return [net[0], net[2], net[4]]

    def make() -> nn.Sequential:
        net = two_layers()
        return net.extend([nn.Tanh(), nn.Linear(6, 6)])

    def build() -> tuple[Any, Any]:
        net = make()
        engine = make_engine(net, OPTIMIZERS[optimizer](groups_of(net)), stage, **options)
        attach(engine)
        torch.optim.lr_scheduler.ConstantLR(engine.optimizer.optimizer)  # wraps its step()
        return engine, net

    def groups_of(net: Any) -> list[dict[str, Any]]:
        return [{"params": net[:4].parameters()}, {"params": net[4].parameters(), "lr": 0.02}]

    def run() -> tuple[float, bool]:
        engine, net = build()
        plain = make()
        oracle = Oracle(plain, OPTIMIZERS[optimizer](groups_of(plain)))
        torch.optim.lr_scheduler.ConstantLR(oracle.optimizer)
        unmoved = True
        for k in range(8):
            for module in (net, plain):
                for number, layer in enumerate(layers(module)):
                    layer.requires_grad_(k not in FROZEN[number])
            before = full_parameters(net)
            for m in range(2):
                x = data(2 * k + m, rank())
                engine.backward(engine(x.bfloat16() if half else x).float().square().mean())
                oracle.backward(lambda r, i=2 * k + m: plain(data(i, r)).square().mean())
            engine.step()
            oracle.step()
            names = [name for name, param in net.named_parameters() if not param.requires_grad]
            unmoved &= all(
                torch.equal(before[name], now) for name, now in full_parameters(net).items() if name in names
            )
            if k == 5:
                engine.save_checkpoint(str(tmp_path))
                engine.destroy()
                engine, net = build()
                assert "zerosync_cohorts" not in engine.load_checkpoint(str(tmp_path))[1]
        return distance(full_parameters(net), full_parameters(plain)), unmoved

    for error, unmoved in run_ranks(run):
        assert unmoved and error <= (0.05 if half else 0.0)


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_frozen_between_backward_and_step_is_stepped(stage: int) -> None:
    """It has a gradient. So it has where only one of several backwards gave it one; not where a window was dropped."""

    def run() -> float:
        net = two_layers()
        plain = copy.deepcopy(net)
        engine = make_engine(net, OPTIMIZERS["adamw"](net.parameters()), stage)
        zerosync = attach(engine, overlap_last=False)
        oracle = Oracle(plain, OPTIMIZERS["adamw"](plain.parameters()))

        def backward(k: int, frozen: bool, drop: bool = False) -> None:
            for module in (net, plain):
                module[0].requires_grad_(not frozen)
            engine.backward(engine(data(k, rank())).square().mean())
            if not drop:
                oracle.backward(lambda r: plain(data(k, r)).square().mean())

        def step() -> None:
            for module in (net, plain):
                module[0].requires_grad_(False)
            engine.step()
            oracle.step()

        backward(0, frozen=False)
        step()
        backward(1, frozen=True)
        backward(2, frozen=False)
        step()
        for drop in (zerosync.abort, engine.zero_grad):
            backward(3, frozen=False, drop=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                drop()
            backward(4, frozen=True)
            step()
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_that_are_added_to_the_optimizer(stage: int) -> None:
    def run() -> None:
        net = two_layers()
        optimizer = torch.optim.SGD(net[2].parameters(), lr=0.5)
        engine = make_engine(net, optimizer, stage)
        attach(engine)
        group = {"params": list(net[0].parameters())}
        with pytest.raises(ValueError, match=r"add_param_group\(\) was called .* Give the optimizer all parameters"):
            engine.optimizer.add_param_group(group)
        optimizer.add_param_group(group)
        engine.backward(engine(data(0, rank())).square().mean())
        with pytest.raises(ValueError, match=r"add_param_group\(\) was called"):
            engine.step()

    run_ranks(run)
