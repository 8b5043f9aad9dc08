"""Optimizers that other packages have: those that need whole parameters, and one that is schedule-free."""

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
                if self.is_whole(group, param):
                    momentum = state.setdefault("momentum", torch.zeros_like(param))
                    momentum.mul_(0.9).add_(param.grad)
                    param.sub_(momentum / (momentum.norm() + 1e-3), alpha=group["lr"])
                else:
                    first = state.setdefault("first", torch.zeros_like(param))
                    second = state.setdefault("second", torch.zeros_like(param))
                    first.lerp_(param.grad, 0.1)
                    second.lerp_(param.grad.square(), 0.05)
                    param.addcdiv_(first, second.sqrt() + 1e-3, value=-group["lr"])

    def is_whole(self, group: dict[str, Any], param: torch.Tensor) -> bool:
        return bool(group["whole"])


class Noted(Mixed):
    """As Moonlight's Muon: its constructor notes in the states how each parameter is stepped."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for param in (param for group in self.param_groups for param in group["params"]):
            self.state[param]["whole"] = param.dim() > 1

    def is_whole(self, group: dict[str, Any], param: torch.Tensor) -> bool:
        return bool(self.state[param]["whole"])


class ScheduleFree(torch.optim.Optimizer):
    """As schedule-free AdamW: z is stepped, x is the mean of all z, and gradients are taken at y, between the two.

    A parameter is y, and after `eval()` it is x. Steps are counted by group. With `whole`, steps are normed.
    """

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.5, decay: float = 0.1, whole: bool = False):
        options = {"lr": lr, "beta": beta, "decay": decay, "whole": whole}
        super().__init__(params, {**options, "k": 0, "weights": 0.0, "trains": False})

    def train(self) -> None:
        self._exchange(True, lambda beta: 1 - beta)

    def eval(self) -> None:
        self._exchange(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def _exchange(self, trains: bool, weight: Any) -> None:
        for group in (group for group in self.param_groups if group["trains"] != trains):
            group["trains"] = trains
            for param in group["params"]:
                if "z" in self.state[param]:
                    param.lerp_(self.state[param]["z"], weight(group["beta"]))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            assert group["trains"], "step() after eval()"
            group["k"] += 1
            group["weights"] += group["k"] * group["lr"]
            part, beta = group["k"] * group["lr"] / group["weights"], group["beta"]
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                if not state:
                    state["z"], state["second"] = param.clone(), torch.zeros_like(param)
                z, second = state["z"], state["second"]
                second.lerp_(param.grad.square(), 0.1)
                update = param.grad / ((second / (1 - 0.9 ** group["k"])).sqrt() + 1e-3) + group["decay"] * param
                if group["whole"]:
                    update = update / update.norm()
                x = torch.lerp(z, param, 1 / beta)
                z.sub_(update, alpha=group["lr"])
                param.copy_(torch.lerp(z, x.lerp(z, part), beta))
        return loss


def mixed(module: torch.nn.Module) -> Mixed:
    """With the matrices in one group, and all others in another one with another learning rate."""
    params = list(module.parameters())
    return Mixed([
        {"params": [param for param in params if param.dim() > 1], "whole": True},
        {"params": [param for param in params if param.dim() < 2], "lr": 0.02},
    ])  # fmt: skip


def noted(module: torch.nn.Module) -> Noted:
    return Noted(module.parameters())


def muon(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon(module.parameters(), lr=0.05)


def adafactor(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(module.parameters(), lr=0.05)
