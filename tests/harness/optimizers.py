"""Optimizers that need whole parameters, as other packages have them."""

from typing import Any

import torch


class Mixed(torch.optim.Optimizer):
    """Matrices are stepped by their normed momentum, as LARS does; groups without `whole` by Adam."""

    def __init__(self, params: Any, lr: float = 0.05, whole: bool = False) -> None:
        super().__init__(params, {"lr": lr, "whole": whole})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if group["whole"]:
                    momentum = state.setdefault("momentum", torch.zeros_like(param))
                    momentum.mul_(0.9).add_(param.grad)
                    param.sub_(momentum / (momentum.norm() + 1e-3), alpha=group["lr"])
                else:
                    first = state.setdefault("first", torch.zeros_like(param))
                    second = state.setdefault("second", torch.zeros_like(param))
                    first.lerp_(param.grad, 0.1)
                    second.lerp_(param.grad.square(), 0.05)
                    param.addcdiv_(first, second.sqrt() + 1e-3, value=-group["lr"])


def mixed(module: torch.nn.Module) -> Mixed:
    """With the matrices in one group, and all others in another one with another learning rate."""
    params = list(module.parameters())
    return Mixed([
        {"params": [param for param in params if param.dim() > 1], "whole": True},
        {"params": [param for param in params if param.dim() < 2], "lr": 0.02},
    ])  # fmt: skip


def muon(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon(module.parameters(), lr=0.05)


def adafactor(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(module.parameters(), lr=0.05)
