"""A run in parts, each on another number of ranks, and its oracle."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tests.harness.engines import rank
from tests.harness.oracle import Oracle, full_parameters

WORLDS = (2, 1, 4, 2, 3)  # ranks of each run; the next goes on where it has ended
STEPS = 2  # of each run


class Net(nn.Module):
    """With a frozen layer and a buffer, which are part of what a run has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.still, self.last = nn.Linear(6, 10), nn.Linear(10, 10), nn.Linear(10, 3)
        self.still.requires_grad_(False)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.last(torch.tanh(self.still(self.first(x)))) * self.scale).square().mean()

    def optimizer(self) -> torch.optim.Optimizer:
        groups = [{"params": self.first.parameters()}, {"params": self.last.parameters(), "lr": 2e-3}]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


def batch(step: int, backward: int, of_rank: int) -> torch.Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(100 * step + 10 * backward + of_rank))


def plain_torch(
    make: Callable[[Net], torch.optim.Optimizer] = Net.optimizer, worlds: Sequence[int] = WORLDS
) -> list[dict[str, torch.Tensor]]:
    """The parameters at the end of each run."""
    ended = []
    net = started(Net())
    optimizer = make(net)
    for run, world in enumerate(worlds):
        oracle = Oracle(net, optimizer, world)
        for step in range(run * STEPS, (run + 1) * STEPS):
            for backward in range(2):
                oracle.backward(lambda rank, step=step, backward=backward: net(batch(step, backward, rank)))
            oracle.step()
        ended.append(full_parameters(net))
    return ended


def started(net: Net) -> Net:
    """What the first run alone has, as one that began from other weights: no constructor gives it."""
    with torch.no_grad():
        net.still.weight.mul_(0.5)
        net.scale.mul_(3.0)
    return net


def train_run(engine: Any, run: int) -> None:
    """The steps of a run on this rank."""
    for step in range(run * STEPS, (run + 1) * STEPS):
        for backward in range(2):
            engine.backward(engine(batch(step, backward, rank())))
        engine.step()
