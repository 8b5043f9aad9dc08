"""A model that reads parameters in every way in which no hook has gathered them, its data and optimizer."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, WORDS, BACKWARDS = 16, 12, 2


def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale


class Block(nn.Module):
    """Two layers, a scale of its own that is passed to a function, and what makes a compiler stop in between."""

    def __init__(self, stop: str) -> None:
        super().__init__()
        self.stop = stop
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.up(x))
        for _ in range(2):
            if self.stop == "break":
                torch._dynamo.graph_break()
        if self.stop == "item" and y.sum().item() > 1e9:
            y = y * 2
        return x + scaled(self.down(y), self.scale)


class Uncompiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    @torch._dynamo.disable
    def forward(self, x: torch.Tensor, other: nn.Linear) -> torch.Tensor:
        for _ in range(2):
            x = x + F.linear(x @ self.weight, other.weight)
        return x


class LowRank(nn.Module):
    """An adapter beside a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, WIDTH) / 8)
        self.b = nn.Parameter(torch.randn(WIDTH, 2) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.base.weight, self.base.bias) + F.linear(F.linear(x, self.a), self.b)


class Model(nn.Module):
    """All that makes a parameter be read where nobody has gathered it."""

    def __init__(self, stop: str = "", layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(stop) for _ in range(layers))
        self.uncompiled, self.adapter, self.other = Uncompiled(), LowRank(), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        x = F.linear(self.uncompiled(x, self.other), self.other.weight, self.other.bias)
        x = self.adapter(x) * self.gain
        return F.cross_entropy(self.head(x) + F.linear(x, self.embedding.weight), words)


def data(k: int, rank: int) -> torch.Tensor:
    return torch.randint(WORDS, (8,), generator=torch.Generator().manual_seed(10 * k + rank))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.01)
