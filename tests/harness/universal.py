"""A run in parts, each on another number of ranks, its oracle, and DeepSpeed's converter of checkpoints."""

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import torch
from deepspeed.checkpoint import ds_to_universal
from torch import nn

from tests.harness.oracle import Oracle, full_parameters

WORLDS = (2, 1, 4, 2, 3)  # ranks of each run; the next goes on where it has ended
PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
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


def batch(step: int, backward: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(100 * step + 10 * backward + rank))


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


def to_universal(saved: Path, universal: Path) -> None:
    """Write the checkpoint `saved`, the folder of a tag, as the universal checkpoint `universal`, as the page says."""
    (command,) = re.findall(r"^python -m deepspeed\.checkpoint\.ds_to_universal (.+)$", PAGE.read_text(), re.MULTILINE)
    folders = {"run/global_step100": str(saved), "run/universal": str(universal)}
    arguments = [folders.pop(word, word) for word in shlex.split(command)]
    assert not folders
    with patch.object(sys, "argv", ["", *arguments, "--num_extract_workers=1", "--num_merge_workers=1"]):
        ds_to_universal.main(ds_to_universal.parse_arguments())
