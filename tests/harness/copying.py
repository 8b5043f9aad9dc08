"""A small network that learns to copy its input, its engine, and its training by plain torch."""

from typing import Any

import torch
from torch import nn

from tests.harness import engines
from tests.harness.oracle import Oracle


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.02)


def make_engine(stage: int, zero: dict[str, Any] | None = None, **config: Any) -> Any:
    module = network()
    return engines.make_engine(module, adamw(module), stage, {"reduce_bucket_size": 300, **(zero or {})}, **config)


def loss_of(module: Any, k: int, rank: int) -> torch.Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * k + rank))
    return (module(x) - x).square().mean()


def oracle(steps: int, backwards: int, clip: dict[int, float] | None = None) -> dict[str, torch.Tensor]:
    """`backwards` of data 0, 1, 2 ... to each of so many steps."""
    module = network()
    loss = lambda module, k, rank: loss_of(module, k, rank) / backwards  # noqa: E731
    return Oracle(module, adamw(module)).train(loss, steps, backwards, clip)
