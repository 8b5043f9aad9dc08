"""segmentation_models_pytorch: a Unet with its Dice loss."""

from typing import Any

import segmentation_models_pytorch as smp
import torch
from lightning.pytorch import LightningModule, Trainer

from trials.ecosystem.projects.data import loader

PLAIN = "ddp_find_unused_parameters_true"  # the last stage of the encoder is not used


class Segmenter(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = smp.Unet(
            "resnet18", encoder_weights=None, encoder_depth=3, decoder_channels=(16, 8, 4), in_channels=1, classes=1
        )
        self.loss = smp.losses.DiceLoss(mode="binary")

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        images, masks = batch
        return self.loss(self.net(images), masks)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def fit(options: dict[str, Any]) -> None:
    images = torch.randn(32, 1, 16, 16)
    Trainer(**options).fit(Segmenter(), loader(images, (images > 0).float(), batch_size=2))
