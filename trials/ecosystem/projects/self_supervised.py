"""lightly: SimSiam, and BYOL's momentum encoder, with lightly's heads and losses."""

import copy
from typing import Any

import torch
from lightly.loss import NegativeCosineSimilarity, NTXentLoss
from lightly.models.modules import BYOLPredictionHead, SimSiamProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightning.pytorch import LightningModule, Trainer

from trials.ecosystem.projects.data import loader


class Byol(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU())
        self.projection = SimSiamProjectionHead(32, 32, 16)
        self.prediction = BYOLPredictionHead(16, 32, 16)
        self.momentum = copy.deepcopy(self.backbone)
        deactivate_requires_grad(self.momentum)
        self.similarity, self.contrast = NegativeCosineSimilarity(), NTXentLoss()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        update_momentum(self.backbone, self.momentum, m=0.9)
        (images,) = batch
        one, other = images, images.flip(-1)
        first, second = self.projection(self.backbone(one)), self.projection(self.backbone(other))
        with torch.no_grad():
            target = self.projection(self.momentum(other))
        return self.similarity(self.prediction(first), target) + self.contrast(first, second)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def fit(options: dict[str, Any]) -> None:
    Trainer(**options).fit(Byol(), loader(torch.randn(64, 1, 8, 8)))
