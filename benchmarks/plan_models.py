"""Models of three kinds, to compare plans with runs: a transformer, a convolutional network, a mixture of experts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn


def transformer() -> tuple[nn.Module, Any]:
    """Return a stack of torch's encoder layers, 25 M parameters, and two sequences of 64 vectors."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 8, enable_nested_tensor=False), (torch.randn(2, 64, 512),)


def convolutional() -> tuple[nn.Module, Any]:
    """Return a network of convolutions and batch norms, 19 M parameters, and four pictures."""
    sizes = [3, 64, 128, 256, 512, 1024]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        if after >= 512:
            layers += [nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000)]
    return nn.Sequential(*layers), (torch.randn(4, 3, 64, 64),)


class Experts(nn.Module):
    """A layer of experts of which each token uses the one that a router picks; all run on all tokens, weighted."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, of shape ``(tokens, width)``, with what the experts add to it."""
        weights = self.router(x).softmax(-1)
        return x + sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def mixture() -> tuple[nn.Module, Any]:
    """Return four layers of eight experts, 17 M parameters, and 128 tokens."""
    return nn.Sequential(*(Experts(256, 8) for _ in range(4))), (torch.randn(128, 256),)
