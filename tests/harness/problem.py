"""A small regression problem: its data by rank and batch, its network, its loss. What the framework tests train."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from tests.harness.oracle import Oracle

WORLD = 2
MICRO = 2  # samples per rank and batch


class Data(Dataset):
    """Batch `b` of rank `r` is samples `MICRO * (WORLD * b + r)` onwards."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(64 * WORLD * MICRO, 16, generator=generator)[: batches * WORLD * MICRO]
        self.y = torch.randn(64 * WORLD * MICRO, 4, generator=generator)[: batches * WORLD * MICRO]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]

    def batch(self, batch: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = MICRO * (WORLD * batch + rank)
        return self.x[start : start + MICRO], self.y[start : start + MICRO]


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    """Needs whole parameters."""
    return torch.optim.Adafactor(parameters, lr=0.02)


def loss_of(net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(net(batch[0]).float(), batch[1].float())


def oracle(optimizer: Callable[[Any], torch.optim.Optimizer] = sgd, make: Callable[[], nn.Module] = network) -> Oracle:
    """The network in one process, with the optimizer that `optimizer(parameters)` makes."""
    net = make()
    return Oracle(net, optimizer(net.parameters()), WORLD)


def backward_of(plain: Oracle, batch: int, over: int = 1) -> None:
    """The backward of a batch on every rank, its loss as a share of the mean over so many."""
    data = Data(batch + 1)
    plain.backward(lambda rank: loss_of(plain.module, data.batch(batch, rank)) / over)
