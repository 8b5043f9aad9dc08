"""The oracle: plain torch in one process on the global batch, and how to compare with it."""

from collections.abc import Callable

import torch


class Oracle:
    """Data-parallel training of `module` by its definition: local gradients per rank, their mean, one step.

    A parameter without a gradient is stepped with zeros, because ZeRO steps flat partitions; one that is frozen is not.
    """

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, world_size: int = 2) -> None:
        self.module = module
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.ranks: list[list[torch.Tensor | None]] = [[None] * len(self.parameters) for _ in range(world_size)]

    def backward(self, loss_of: Callable[[int], torch.Tensor]) -> None:
        """One backward on every rank; `loss_of(rank)` is that rank's loss."""
        for rank in range(len(self.ranks)):
            self.backward_on(rank, loss_of(rank))

    def backward_on(self, rank: int, loss: torch.Tensor) -> None:
        for param, grad in zip(self.parameters, self.ranks[rank], strict=True):
            param.grad = grad
        loss.backward()
        self.ranks[rank] = [param.grad for param in self.parameters]

    def zero_grad(self) -> None:
        self.ranks = [[None] * len(self.parameters) for _ in self.ranks]

    def step(self, clip: float = 0.0) -> float:
        """One optimizer step, clipped to this norm unless it is 0; the norm before that, or 0."""
        for param, *grads in zip(self.parameters, *self.ranks, strict=True):
            if not param.requires_grad and all(grad is None for grad in grads):
                param.grad = None
                continue
            total = torch.zeros_like(param)
            for grad in grads:
                if grad is not None:
                    total += grad
            param.grad = total / len(grads)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, clip)) if clip else 0.0
        self.optimizer.step()
        self.zero_grad()
        return norm


def backward_all(oracles: list[Oracle], loss_of: Callable[[int], torch.Tensor]) -> None:
    """One backward on every rank, with gradients for the parameters of all `oracles`, which have one module."""
    for rank in range(len(oracles[0].ranks)):
        for oracle in oracles:
            for param, grad in zip(oracle.parameters, oracle.ranks[rank], strict=True):
                param.grad = grad
        loss_of(rank).backward()
        for oracle in oracles:
            oracle.ranks[rank] = [param.grad for param in oracle.parameters]


def full_parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter in full and in fp32; under ZeRO-3 they are gathered. A collective call there."""
    import deepspeed

    full = {}
    for name, param in module.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            full[name] = param.detach().clone().float()
    return full


def distance(ours: dict[str, torch.Tensor], oracle: dict[str, torch.Tensor]) -> float:
    """The largest difference of any element; the two must name the same parameters."""
    assert ours.keys() == oracle.keys(), ours.keys() ^ oracle.keys()
    return max(_max(ours[name] - oracle[name]) for name in ours)


def _max(difference: torch.Tensor) -> float:
    assert torch.isfinite(difference).all()
    return difference.abs().max().item() if difference.numel() else 0.0
