"""Reading and writing parameters in full on any stage (N1): target networks, moving averages, clamps."""

import copy
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from tests.harness.data import noise
from tests.harness.engines import make_engine, rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach


class WithTarget(nn.Module):
    """A network, and a copy that follows it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.online = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            goal = self.target(x)
        return (self.online(x) - goal - 1.0).square().mean()

    def follow(self) -> None:
        for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
            target.data.lerp_(online.data, 0.25)
            online.data.clamp_(-0.3, 0.3)


data = noise(4, 6)


SHARDED = {"stage3_param_persistence_threshold": 0}


@pytest.mark.extended(but=("2", "3, held"))
@pytest.mark.parametrize(
    ("stage", "zero", "options"),
    [(1, {}, {}), (2, {}, {}), (3, {}, {}), (3, SHARDED, {}), (3, SHARDED, {"param_memory_budget": "all"})],
    ids=["1", "2", "3, persistent", "3, sharded", "3, held"],
)
def test_a_target_network_follows(stage: int, zero: dict[str, Any], options: dict[str, Any]) -> None:
    def run() -> tuple[float, bool]:
        net = WithTarget()
        plain = copy.deepcopy(net)

        def sgd(module: WithTarget) -> torch.optim.Optimizer:
            return torch.optim.SGD(module.online.parameters(), lr=0.2, momentum=0.9)

        engine, oracle = make_engine(net, sgd(net), stage, zero), Oracle(plain, sgd(plain))
        zerosync, read = attach(engine, **options), True
        for k in range(4):
            engine.backward(engine(data(k, rank())))
            oracle.backward(lambda r, k=k: plain(data(k, r)))
            if k == 1:  # between a backward and its step
                with zerosync.full_parameters():
                    net.follow()
                plain.follow()
            engine.step()
            oracle.step()
            with zerosync.full_parameters():
                read &= distance(dict(net.named_parameters()), full_parameters(plain)) == 0.0
                net.follow()
            plain.follow()
        return distance(full_parameters(net), full_parameters(plain)), read

    assert run_ranks(run) == [(0.0, True)] * 2


def test_in_half_precision_what_is_not_written_keeps_its_master_weights() -> None:
    def run() -> tuple[bool, float]:
        net = WithTarget()
        optimizer = torch.optim.SGD(net.online.parameters(), lr=0.0)
        engine = make_engine(net, optimizer, 3, SHARDED, bf16={"enabled": True})
        zerosync = attach(engine)
        masters = [param for group in optimizer.param_groups for param in group["params"]]

        def step() -> None:
            engine.backward(engine(data(0, rank()).bfloat16()).float())
            engine.step()

        step()
        before = [master.detach().clone() for master in masters]
        with zerosync.full_parameters():
            pass
        step()
        kept = all(torch.equal(master, old) for master, old in zip(masters, before, strict=True))
        with zerosync.full_parameters([net.online[0].weight]):
            net.online[0].weight.data.fill_(0.125)
        step()
        return kept, float((full_parameters(net)["online.0.weight"] - 0.125).abs().max())

    assert run_ranks(run) == [(True, 0.0)] * 2


class Stops(nn.Module):
    """A forward that may stop before modules that ZeRO-3 has begun to gather for it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, stop: bool = False) -> torch.Tensor:
        hidden = self.first(x).tanh()
        return hidden.mean() if stop else self.second(hidden).square().mean()


@pytest.mark.extended(but=("to write",))
@pytest.mark.parametrize("reads", [True, False], ids=["to read", "to write"])
def test_what_is_on_its_way_is_waited_for(reads: bool) -> None:
    """DeepSpeed takes a prefetched parameter for gathered: it reads what is not there, and fails at the end."""

    def run() -> float:
        net = Stops()
        plain = copy.deepcopy(net)

        def sgd(module: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(module.parameters(), lr=0.2)

        zero = {**SHARDED, "stage3_prefetch_bucket_size": 40}  # one layer ahead
        engine, oracle = make_engine(net, sgd(net), 3, zero), Oracle(plain, sgd(plain))
        zerosync = attach(engine)
        for k in range(6):
            if k > 2:  # the order of the modules is known from now on, and prefetched by
                with torch.no_grad():
                    engine(data(k, rank()), stop=True)
                params = list(net.parameters())
                with deepspeed.zero.GatheredParameters(params) if reads else zerosync.full_parameters():
                    assert distance(dict(net.named_parameters()), full_parameters(plain)) == 0.0
                    if not reads:
                        net.second.weight.data.mul_(0.5)
                        plain.second.weight.data.mul_(0.5)
            engine.backward(engine(data(k, rank())))
            oracle.backward(lambda r, k=k: plain(data(k, r)))
            engine.step()
            oracle.step()
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]


def test_a_block_inside_of_a_block() -> None:
    """As over the handles of several optimizers, the first of which has the whole module."""

    def run() -> list[float]:
        net = WithTarget()
        engine = make_engine(
            net, torch.optim.SGD(net.parameters(), lr=0.1), 3, {"stage3_param_persistence_threshold": 0}
        )
        zerosync = attach(engine)
        first = next(net.parameters())
        with zerosync.full_parameters(), torch.no_grad():
            with zerosync.full_parameters([first]):
                first.fill_(2.0)
            first[0] += 1.0
        with zerosync.full_parameters():
            return [float(first.min()), float(first.max())]

    assert run_ranks(run) == [[2.0, 3.0]] * 2
