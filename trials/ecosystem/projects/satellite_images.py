"""torchgeo: its classification task, which is a module of Lightning."""

from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader
from torchgeo.trainers import ClassificationTask


def fit(options: dict[str, Any]) -> None:
    task = ClassificationTask(model="resnet18", in_channels=4, num_classes=3, lr=1e-3)
    rows = [{"image": torch.randn(4, 32, 32), "label": number % 3} for number in range(32)]
    loader = DataLoader(rows, batch_size=2)
    Trainer(**options).fit(task, loader, loader)  # its scheduler looks at the loss of the validation
