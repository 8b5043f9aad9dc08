"""kornia: a spatial transformer with its geometry, and its losses."""

from typing import Any

import kornia
import torch
from lightning.pytorch import LightningModule, Trainer

from trials.ecosystem.projects.data import loader


class Aligner(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(256, 32), torch.nn.Tanh(), torch.nn.Linear(32, 6)
        )

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        images, wanted = batch
        unit = torch.eye(2, 3).expand(len(images), 2, 3)
        moved = kornia.geometry.transform.warp_affine(images, unit + 0.1 * self.net(images).view(-1, 2, 3), (16, 16))
        return kornia.losses.charbonnier_loss(moved, wanted, reduction="mean")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fit(options: dict[str, Any]) -> None:
    images = kornia.filters.gaussian_blur2d(torch.randn(64, 1, 16, 16), (5, 5), (2.0, 2.0))
    Trainer(**options).fit(Aligner(), loader(images, images.roll(1, -1)))
