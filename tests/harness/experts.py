"""Modules with parameters that a rank uses or does not, as its tokens go."""

import torch
from torch import nn


class Switch(nn.Module):
    """Top-1 routing: each token goes to the expert that the router prefers, and an expert without tokens is not run."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share, chosen = torch.softmax(self.router(x), -1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens = (chosen == number).nonzero()[:, 0]
            if len(tokens):
                out = out.index_add(0, tokens, share[tokens, None] * expert(x[tokens]))
        return out


class Tables(nn.Module):
    """Parameters of one module, of which each token uses one."""

    def __init__(self, width: int, tables: int) -> None:
        super().__init__()
        self.tables = tables
        for number in range(tables):
            self.register_parameter(f"table{number}", nn.Parameter(torch.randn(width, width) / width))

    def forward(self, x: torch.Tensor, routes: torch.Tensor | None = None) -> torch.Tensor:
        chosen = ((x if routes is None else routes).argmax(-1) % self.tables).tolist()
        return torch.stack([row @ getattr(self, f"table{number}") for row, number in zip(x, chosen, strict=True)])


def routed_network() -> nn.Module:
    """The network of `problem.py`, with tables in it."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), Tables(32, 3), nn.Tanh(), nn.Linear(32, 4))


def gathered_anew() -> dict[str, int]:
    """DeepSpeed's options by which a small model gathers each module for itself, as a large one does by default."""
    options = ("param_persistence_threshold", "prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")
    return {f"stage3_{option}": 0 for option in options}
