"""The problem of `problem.py` for the Trainer of transformers."""

from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import Trainer

from tests.harness.problem import Data, loss_of, network


class Model(torch.nn.Module):
    """As the Trainer calls one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": loss_of(self.net, (x, y))}


class Rows(Data):
    def __getitem__(self, index: int) -> Any:
        return {"x": self.x[index], "y": self.y[index]}


class InOrder(Trainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)
