"""pytorch-metric-learning: its losses and miners in a module."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from pytorch_metric_learning.losses import ArcFaceLoss, TripletMarginLoss
from pytorch_metric_learning.miners import MultiSimilarityMiner

from trials.ecosystem.projects.data import loader


class Embedding(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
        self.triplet, self.miner = TripletMarginLoss(), MultiSimilarityMiner()
        self.arcface = ArcFaceLoss(num_classes=3, embedding_size=8)  # has weights of its own

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        inputs, labels = batch
        embeddings = self.net(inputs)
        pairs = self.miner(embeddings, labels)
        return self.triplet(embeddings, labels, pairs) + self.arcface(embeddings, labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def fit(options: dict[str, Any]) -> None:
    inputs = torch.randn(128, 16)
    Trainer(**options).fit(Embedding(), loader(inputs, torch.arange(128) % 3, batch_size=6))
