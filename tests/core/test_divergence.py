"""Ranks that run different modules (W6): the gradient is that of the mean loss, and nobody waits in vain."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.harness.engines import expect_timeout, make_engine, rank
from tests.harness.native import send_natively
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.comm import nodes
from zerosync_strategy.core.gradients import reducer

WIDTH = 6


class Branches(nn.Module):
    """Experts of several sizes, of which each call runs some, in any order and any number of times."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * k + 3), nn.Tanh(), nn.Linear(2 * k + 3, WIDTH)) for k in range(5)
        )
        self.scale = nn.Parameter(torch.ones(WIDTH))  # of the root itself, which all ranks run

    def forward(self, x: torch.Tensor, calls: list[int]) -> torch.Tensor:
        for call in calls:
            expert = self.experts[call % 5]
            x = x + (checkpoint(expert, x, use_reentrant=False) if call > 5 else expert(x))
        return x * self.scale


def calls_of(seed: int, steps: int, ranks: int) -> list[list[list[list[int]]]]:
    """What to run: of each step and rank, for each of its backwards, which experts; those above 5 with checkpoints."""
    draw = random.Random(seed)
    return [
        [
            [[draw.randrange(10) for _ in range(draw.randrange(4))] for _ in range(draw.randint(1, 3))]
            for _ in range(ranks)
        ]
        for _ in range(steps)
    ]


def model() -> Branches:
    torch.manual_seed(1)
    return Branches()


def loss_of(module: Any, step: int, of_rank: int, micro: int, calls: list[int]) -> torch.Tensor:
    data = torch.Generator().manual_seed(100 * step + 10 * of_rank + micro)
    return module(torch.randn(3, WIDTH, generator=data), calls).square().mean()


def errors(stage: int, seeds: range, ranks: int, promised: bool) -> list[float]:
    """How far from plain torch the parameters are, with AdamW, after four steps and an evaluation."""
    found = []
    for seed in seeds:
        net, plain = model(), model()
        zero = {"stage3_param_persistence_threshold": random.Random(seed).choice([0, 20])}
        engine = make_engine(net, torch.optim.AdamW(net.parameters(), lr=0.03), stage, zero)
        held = {"param_memory_budget": "all"} if stage == 3 else {}
        zerosync = attach(engine, overlap_last=seed % 3 > 0, **held)  # else all is reduced after the last backward
        oracle = Oracle(plain, torch.optim.AdamW(plain.parameters(), lr=0.03), ranks)
        for step, by_rank in enumerate(calls_of(seed, 4, ranks)):
            most = max(map(len, by_rank))
            for of_rank, micros in enumerate(by_rank):
                if promised:  # then all ranks make as many
                    micros += [[1]] * (most - len(micros))
                for micro, calls in enumerate(micros):
                    oracle.backward_on(of_rank, loss_of(plain, step, of_rank, micro, calls))
            oracle.step()
            micros = by_rank[rank()]
            for micro, calls in enumerate(micros):
                loss = loss_of(engine, step, rank(), micro, calls)
                if promised and micro == most - 1:
                    zerosync.window.expect_last()
                engine.backward(loss)
            engine.step()
            if step == 2:  # as long on each rank as its data is
                with torch.no_grad():
                    for length in range(1 + rank()):
                        loss_of(engine, step, rank(), length, [rank(), 4 - rank()])
        found.append(distance(full_parameters(net), full_parameters(plain)))
    return found


@pytest.mark.extended(but=("3-False",))
@pytest.mark.parametrize("promised", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_random_calls(stage: int, promised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "WITHIN_HOST", nodes.MessageSizes(300, 2))
    assert run_ranks(errors, stage, range(8), 2, promised, timeout=120) == [[0.0] * 8] * 2


@pytest.mark.extended(but=("3-False",))
@pytest.mark.parametrize("promised", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_random_calls_on_three_ranks_by_native_collectives(
    stage: int, promised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing but the order decides what meets what."""
    send_natively(monkeypatch)
    monkeypatch.setattr(reducer, "SMALL_BYTES", 100)
    for found in run_ranks(errors, stage, range(100, 104), 3, promised, world_size=3, timeout=120):
        assert max(found) == 0.0


def _fails(run: Callable[[], Any]) -> str:
    try:
        run()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.off_device("ranks that gather differently end in the communicator")
def test_the_error_without_held_parameters_names_the_option() -> None:
    def run() -> str:
        net = model()
        engine = make_engine(net, torch.optim.AdamW(net.parameters()), 3, {"stage3_param_persistence_threshold": 0})
        attach(engine)
        expect_timeout()

        def step() -> None:
            engine.backward(loss_of(engine, 0, rank(), 0, [1] if rank() else [2, 3]))
            engine.step()

        return _fails(step)

    for error in run_ranks(run, timeout=120):
        assert "RankError" in error and "param_memory_budget='all'" in error
