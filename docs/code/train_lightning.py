"""Lightning. Two ranks on CPU, or every GPU: python docs/code/train_lightning.py"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from zerosync_strategy import ZeroSyncMonitor, ZeroSyncStrategy


class Module(LightningModule):
    """Nothing in it knows of ZeroSync."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 1),
        )

    def training_step(self, batch, batch_idx):
        (x,) = batch
        return mse_loss(self.net(x), x.sum(1, keepdim=True))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    gpu = torch.cuda.is_available()
    trainer = Trainer(
        strategy=ZeroSyncStrategy(stage=3),
        accelerator="cuda" if gpu else "cpu",
        devices=-1 if gpu else 2,
        accumulate_grad_batches=4,
        gradient_clip_val=1.0,
        max_epochs=1,
        callbacks=[ZeroSyncMonitor(prog_bar=True)],
        logger=False,
        enable_checkpointing=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(512, 16)), batch_size=8))
    # --8<-- [start:saving]
    trainer.save_checkpoint("out/docs-lightning.ckpt")  # to go on from: trainer.fit(..., ckpt_path=...)
    trainer.strategy.zerosync.export("out/docs-lightning", module.net)  # weights in full, as model.safetensors
    # --8<-- [end:saving]
    if trainer.is_global_zero:
        print(trainer.strategy.zerosync.report)
