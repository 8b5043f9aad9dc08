"""Activation checkpointing, which runs forwards inside of backwards, together with the memory budgets."""

from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from tests.harness.engines import make_engine, rank, start
from tests.harness.extended import STAGES
from tests.harness.oracle import Oracle, distance, full_parameters, of_trained
from tests.harness.ranks import run_ranks
from tests.harness.releases import since
from zerosync_strategy import attach

WIDTH, BLOCKS = 8, 3
BLOCK_BYTES = 4 * (2 * WIDTH * WIDTH + 2 * WIDTH)
CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "torch, reentrant": partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
    "torch": partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    "DeepSpeed": deepspeed.checkpointing.checkpoint,
}


class Net(nn.Module):
    """Blocks of which all but the first are checkpointed, and their first layers are one."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS)
        )
        self.blocks[-1][0].weight = self.blocks[0][0].weight
        self.checkpoint = checkpoint

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + self.checkpoint(block, x)
        return x.square().mean()


def loss_of(net: Any, k: int, rank: int) -> torch.Tensor:
    return net(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * k + rank)))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


BUDGETS = [(None, 0), (BLOCK_BYTES, 0), (0, 0)]  # of gradients and of parameters
BUDGETS_OF_STAGE_3 = [(None, 0), (None, "all"), (BLOCK_BYTES, BLOCK_BYTES), (0, "all")]


def plain_torch() -> dict[str, torch.Tensor]:
    net = Net(lambda block, x: block(x))
    return Oracle(net, sgd(net)).train(loss_of, 3, 2)


@pytest.mark.extended(but=("3-torch",))
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=since("0.19.6", "it has streams on GPUs alone") if how == "DeepSpeed" else ())
        for how in CHECKPOINTS
    ],
)
@pytest.mark.parametrize("stage", STAGES)
def test_budgets(stage: int, how: str) -> None:
    """Three steps of two backwards."""

    def run() -> dict[Any, float]:
        start()
        deepspeed.checkpointing.configure(None)
        expected, found = plain_torch(), {}
        for unreduced, gathered in BUDGETS_OF_STAGE_3 if stage == 3 else BUDGETS:
            net = Net(CHECKPOINTS[how])
            engine = make_engine(net, sgd(net), stage, {"stage3_param_persistence_threshold": 0} if stage == 3 else {})
            zerosync = attach(engine, grad_memory_budget=unreduced, param_memory_budget=gathered)
            for k in range(6):
                loss = loss_of(engine, k, rank())
                loss.backward() if k == 2 else engine.backward(loss)
                if k % 2:
                    engine.step()
                    assert zerosync.report.backwards == 2
            found[unreduced, gathered] = distance(full_parameters(net), expected)
            engine.destroy()
        return found

    for found in run_ranks(run):
        assert set(found.values()) == {0.0}, found


class Attention(nn.Module):
    """Reads the parameters of its output layer, whose hooks do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inside(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    """Keeps its parameters in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x)[0]


class Listed(nn.Module):
    """Calls no layer, and reads parameters from a list, past the module's attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)
        self.listed = list(self.inside.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(nn.functional.linear(x, *self.listed))


READERS: dict[str, Callable[[], nn.Module]] = {
    "attention": Attention,
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
    "recurrent": Recurrent,
    "listed": Listed,
}


class Readers(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(READERS[kind]() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


def sequences(net: Any, k: int, rank: int) -> torch.Tensor:
    return net(torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(10 * k + rank)))


def evaluated(net: Any) -> torch.Tensor:
    """In eval mode, where nn.TransformerEncoderLayer is one call of the parameters of all its layers."""
    net.eval()
    with torch.no_grad():
        return sequences(net, 9, 0)


@pytest.mark.extended
@pytest.mark.parametrize("eager_frames", [True, False])
@pytest.mark.parametrize("kind", READERS)
def test_modules_that_read_the_parameters_of_others(kind: str, eager_frames: bool) -> None:
    """Gathered in many small messages, so that they are still on their way: in the forward and in its repetition."""
    cases = [(0, "all"), (1000, "all"), (0, 700), (0, 0)]  # DeepSpeed's persistence, and the budget of parameters
    if kind == "listed" and not eager_frames:
        cases = cases[:2]  # as in DeepSpeed itself, nobody gathers them

    def run() -> dict[Any, float]:
        start()
        net = Readers(kind)
        oracle = Oracle(net, sgd(net))
        oracle.train(sequences, 3, 2)
        expected, found = {**full_parameters(net), "evaluated": of_trained(net, lambda: evaluated(net))}, {}
        for threshold, budget in cases:
            net = Readers(kind)
            small = {"stage3_param_persistence_threshold": threshold, "stage3_prefetch_bucket_size": 20}
            engine = make_engine(net, sgd(net), 3, small)
            attach(engine, param_memory_budget=budget, eager_frames=eager_frames)
            for k in range(6):
                engine.backward(sequences(engine, k, rank()))
                if k % 2:
                    engine.step()
            value = evaluated(engine)
            found[threshold, budget] = distance({**full_parameters(net), "evaluated": value}, expected)
            engine.destroy()
        return found

    for found in run_ranks(run):
        assert len(found) == len(cases) and max(found.values()) == 0.0, found
