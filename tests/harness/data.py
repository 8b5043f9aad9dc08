"""Inputs that every rank can make for every other one."""

from collections.abc import Callable

import torch


def noise(*shape: int) -> Callable[[int, int], torch.Tensor]:
    """A function of a micro-batch's number and a rank: that micro-batch, of this shape, from a normal distribution."""
    return lambda k, rank: torch.randn(*shape, generator=torch.Generator().manual_seed(10 * k + rank))
