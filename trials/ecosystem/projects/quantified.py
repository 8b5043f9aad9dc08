"""lightning-uq-box: its mean-variance estimation, which is a module of Lightning."""

from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning_uq_box.uq_methods import MVERegression
from torch.utils.data import DataLoader


def fit(options: dict[str, Any]) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.Tanh(), torch.nn.Linear(256, 2))
    inputs = torch.randn(64, 8)
    rows = [{"input": row, "target": row.sum().view(1)} for row in inputs]
    Trainer(**options).fit(MVERegression(net, burnin_epochs=0), DataLoader(rows, batch_size=4))
