"""Lightning, manual optimization with two optimizers: python docs/code/train_lightning_manual.py"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

from zerosync_strategy import ZeroSyncStrategy


class Gan(LightningModule):
    """Each optimizer has an engine and a window of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
        self.discriminator = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def made(self, batch):
        return self.generator(torch.randn(len(batch[0]), 4, device=self.device))

    def discriminator_loss(self, batch):
        made = self.made(batch).detach()
        return (softplus(-self.discriminator(batch[0])) + softplus(self.discriminator(made))).mean()

    def generator_loss(self, batch):
        return softplus(-self.discriminator(self.made(batch))).mean()

    # --8<-- [start:several]
    def configure_optimizers(self):
        models = (self.generator, self.discriminator)
        return [torch.optim.Adam(model.parameters()) for model in models]

    def training_step(self, batch, batch_idx):
        of_generator, of_discriminator = self.optimizers()
        with self.toggled_optimizer(of_discriminator):
            self.manual_backward(self.discriminator_loss(batch))
            of_discriminator.step()
            of_discriminator.zero_grad()
        with self.toggled_optimizer(of_generator):
            # through the discriminator, which is frozen here
            self.manual_backward(self.generator_loss(batch))
            if batch_idx % 2:  # over two batches
                of_generator.step()
                of_generator.zero_grad()

    # --8<-- [end:several]


if __name__ == "__main__":
    trainer = Trainer(
        strategy=ZeroSyncStrategy(stage=2), accelerator="cpu", devices=2, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Gan(), DataLoader(TensorDataset(torch.randn(64, 16)), batch_size=4))
    if trainer.is_global_zero:
        for zerosync in trainer.strategy.zerosyncs:
            print(zerosync.report.backwards, "backwards,", zerosync.report.reductions, "reduction")
