"""The oracle of training with fp32 master weights: plain torch in one process, parameters in fp32, bf16 or fp16."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class Masters:
    """Data-parallel training of `module` in `dtype`: gradients of a scaled loss, and fp32 weights that are stepped.

    `make_optimizer(weights)` makes the optimizer. The gradients of one rank are added up in `dtype`, and the mean over
    the ranks is rounded to it. A step with a gradient that is no number is skipped.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, make_optimizer: Callable[[Any], Any], world: int = 2,
        scale: float = 1.0, clip: float = 0.0,
    ) -> None:  # fmt: skip
        self.masters = [nn.Parameter(param.detach().float().clone()) for param in module.parameters()]
        self.module, self.optimizer = module.to(dtype), make_optimizer(self.masters)
        self.dtype, self.world, self.scale, self.clip = dtype, world, scale, clip
        self.largest_gradient = 0.0
        """Of the last step, scaled, before it was clipped."""

    def step(self, loss_of: Callable[[Any, int, int], torch.Tensor], ks: Iterable[int]) -> float | None:
        """Backwards of `loss_of(module, k, rank)` for each k of each rank, and a step: the norm, or None if skipped."""
        ranks = []
        for rank in range(self.world):
            self.module.zero_grad()
            for k in ks:
                (loss_of(self.module, k, rank) * self.scale).backward()
            ranks.append([param.grad for param in self.module.parameters()])
        means = [torch.stack(each).float().mean(0).to(self.dtype).float() for each in zip(*ranks, strict=True)]
        if not all(mean.isfinite().all() for mean in means):
            return None
        self.largest_gradient = max(float(mean.abs().max()) for mean in means)
        for master, mean in zip(self.masters, means, strict=True):
            master.grad = mean / self.scale
        norm = float(torch.nn.utils.clip_grad_norm_(self.masters, self.clip or torch.inf))
        self.optimizer.step()
        self._write()
        return norm

    def switch(self, mode: str) -> None:
        """Call `train()` or `eval()` of an optimizer that exchanges the weights for others."""
        getattr(self.optimizer, mode)()
        self._write()

    @torch.no_grad()
    def _write(self) -> None:
        for param, master in zip(self.module.parameters(), self.masters, strict=True):
            param.copy_(master)

    def parameters(self) -> dict[str, torch.Tensor]:
        """The fp32 weights by name."""
        names = dict(self.module.named_parameters())
        return dict(zip(names, (master.detach() for master in self.masters), strict=True))
