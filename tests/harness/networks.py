"""Small networks, the same on every rank."""

import torch
from torch import nn


def stack(width: int, layers: int, seed: int = 0) -> nn.Sequential:
    """Blocks of a linear layer and a tanh."""
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)])


def two_layers(width: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def matrices(width: int, layers: int, seed: int = 0) -> nn.Sequential:
    """Linear layers without a bias."""
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
