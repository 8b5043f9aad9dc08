"""An attached engine, and plain torch beside it, trained alike."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.harness.engines import make_engine, rank
from tests.harness.oracle import Oracle, distance, full_parameters
from zerosync_strategy import attach

Loss = Callable[[Any, int, int], torch.Tensor]
"""Of a module, for a number of data and a rank."""


def square_of(data: Callable[[int, int], torch.Tensor]) -> Loss:
    """The mean square of what a module makes of ``data(k, rank)``."""
    return lambda module, k, of_rank: module(data(k, of_rank)).square().mean()


class Beside:
    """``net`` is trained by ``engine``, and ``plain``, which was the same, by ``oracle``."""

    def __init__(
        self, make: Callable[[], nn.Module], optimizer: Callable[[nn.Module], torch.optim.Optimizer], loss_of: Loss,
        stage: int = 3, zero: dict[str, Any] | None = None, options: dict[str, Any] | None = None, ranks: int = 2,
        **config: Any,
    ) -> None:  # fmt: skip
        self.net, self.plain, self.loss_of = make(), make(), loss_of
        self.engine = make_engine(self.net, optimizer(self.net), stage, zero, **config)
        self.zerosync = attach(self.engine, **(options or {}))
        self.oracle = Oracle(self.plain, optimizer(self.plain), ranks)
        self.made = 0
        """Backwards on data 0, 1, 2 ... whose number the caller does not give."""

    def backward(self, k: int | None = None, raw: bool = False) -> None:
        if k is None:
            k, self.made = self.made, self.made + 1
        loss = self.loss_of(self.engine, k, rank())
        loss.backward() if raw else self.engine.backward(loss)
        self.oracle.backward(lambda of_rank: self.loss_of(self.plain, k, of_rank))

    def step(self) -> Any:
        """The report of the step."""
        self.engine.step()
        self.oracle.step()
        return self.zerosync.report

    def error(self) -> float:
        return distance(full_parameters(self.net), full_parameters(self.plain))
