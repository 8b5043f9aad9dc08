"""torch-uncertainty: its classification routine, which is a module of Lightning."""

from typing import Any

import torch
from lightning.pytorch import Trainer
from torch_uncertainty.routines import ClassificationRoutine

from trials.ecosystem.projects.data import loader


def fit(options: dict[str, Any]) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(16, 128), torch.nn.ReLU(), torch.nn.Linear(128, 3))
    routine = ClassificationRoutine(
        num_classes=3,
        model=net,
        loss=torch.nn.CrossEntropyLoss(),
        optim_recipe=torch.optim.SGD(net.parameters(), lr=0.1),
    )
    Trainer(**options).fit(routine, loader(torch.randn(64, 16), torch.arange(64) % 3))
