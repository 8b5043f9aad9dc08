"""MONAI: its UNet and Dice loss."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from monai.losses import DiceCELoss
from monai.networks.nets import UNet

from trials.ecosystem.projects.data import loader


class Segmenter(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = UNet(spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2))
        self.loss = DiceCELoss(to_onehot_y=True, softmax=True)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        images, masks = batch
        return self.loss(self.net(images), masks)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def fit(options: dict[str, Any]) -> None:
    images = torch.randn(32, 1, 16, 16)
    Trainer(**options).fit(Segmenter(), loader(images, (images > 0).float(), batch_size=2))
