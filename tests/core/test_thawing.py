"""Parameters that are frozen and thawed while an engine trains (N1)."""

import copy

import pytest
import torch
from torch import nn

from tests.harness.engines import make_engine, rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def data(k: int, of_rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * k + of_rank))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_that_was_frozen_when_the_engine_was_built(stage: int) -> None:
    """DeepSpeed has no place for its gradient, and would never train it, silently."""

    def run() -> None:
        net = network()
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


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_that_is_frozen_for_some_steps(stage: int) -> None:
    """It requires a gradient while the engine is built, as the error above says, and trains from when it is thawed."""

    def run() -> float:
        net = network()
        plain = copy.deepcopy(net)
        engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=0.5), stage)
        attach(engine)
        oracle = Oracle(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
        for k in range(4):
            for module in (net, plain):
                module[0].requires_grad_(k >= 2)
            engine.backward(engine(data(k, rank())).square().mean())
            oracle.backward(lambda r, k=k: plain(data(k, r)).square().mean())
            engine.step()
            oracle.step()
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]
