"""A small conditional GAN on the handwritten digits of scikit-learn: two optimizers, a DeepSpeed engine each.

    python examples/lightning_gan.py

trains on 2 CPU ranks under ZeRO-2 and writes generated digits, a row per class, to out/digits.png. The discriminator
steps at every batch; the generator accumulates over two, so its window has two backwards.
"""

from __future__ import annotations

import argparse
import logging
import os
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from zerosync_strategy import ZeroSyncStrategy

CLASSES, LATENT, WIDTH, SIDE = 10, 32, 256, 8
BATCH = 64  # per rank
OUT = Path(__file__).resolve().parents[1] / "out"  # git ignores it


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.label = nn.Embedding(CLASSES, LATENT)
        layers: list[nn.Module] = []
        for width in (2 * LATENT, WIDTH):
            layers += [nn.Linear(width, WIDTH), nn.LayerNorm(WIDTH), nn.LeakyReLU(0.2)]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, SIDE * SIDE), nn.Tanh())

    def forward(self, noise: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([noise, self.label(label)], 1)).view(-1, SIDE, SIDE)


class Discriminator(nn.Module):
    """Judges whether an image is real, and of its class: the class picks a direction in the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.label = nn.Embedding(CLASSES, WIDTH)
        layers: list[nn.Module] = [nn.Flatten()]
        for width in (SIDE * SIDE, WIDTH):
            layers += [nn.Linear(width, WIDTH), nn.LeakyReLU(0.2), nn.Dropout(0.3)]
        self.net = nn.Sequential(*layers)
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        features = self.net(image)
        return self.score(features).squeeze(1) + (self.label(label) * features).sum(1) / WIDTH**0.5


class DigitsGAN(LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.steps = steps
        self.generator, self.discriminator = Generator(), Discriminator()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.99))
            for part in (self.generator, self.discriminator)
        ]

    def train_dataloader(self) -> DataLoader:
        digits = load_digits()
        data = TensorDataset(torch.tensor(digits.images, dtype=torch.float32) / 8 - 1, torch.tensor(digits.target))
        own = torch.Generator().manual_seed(self.global_rank)
        sampler = RandomSampler(data, replacement=True, num_samples=self.steps * BATCH, generator=own)
        return DataLoader(data, batch_size=BATCH, sampler=sampler)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_generator, of_discriminator = self.optimizers()
        real, label = batch
        blur = 0.3 * (1 - batch_idx / self.steps)  # on what the discriminator sees, less and less

        def judge(image: torch.Tensor) -> torch.Tensor:
            return self.discriminator(image + blur * torch.randn_like(image), label)

        with self.toggled_optimizer(of_discriminator):
            fake = self.generator(torch.randn(len(label), LATENT, device=self.device), label)
            loss = F.relu(1 - judge(real)).mean() + F.relu(1 + judge(fake)).mean()
            self.manual_backward(loss)
            of_discriminator.step()
            of_discriminator.zero_grad()

        with self.toggled_optimizer(of_generator):
            fake = self.generator(torch.randn(len(label), LATENT, device=self.device), label)
            self.manual_backward(-judge(fake).mean() / 2)
            if batch_idx % 2:
                of_generator.step()
                of_generator.zero_grad()
        self.log("discriminator", loss, prog_bar=True)

    @torch.no_grad()
    def digits(self, columns: int) -> torch.Tensor:
        """Generated digits, a row per class, as bytes. Under ZeRO-3 all ranks must call it."""
        label = torch.arange(CLASSES, device=self.device).repeat_interleave(columns)
        images = self.generator(torch.randn(len(label), LATENT, device=self.device), label)
        images = F.pad(((images + 1) * 127.5).clamp(0, 255).byte(), (1, 1, 1, 1)).view(CLASSES, columns, SIDE + 2, -1)
        return images.transpose(1, 2).reshape(CLASSES * (SIDE + 2), -1)

    def on_train_end(self) -> None:
        self.picture = self.digits(12).cpu()
        self.reports = [zerosync.report for zerosync in self.trainer.strategy.zerosyncs]


@rank_zero_only
def write_png(path: Path, gray: torch.Tensor, scale: int = 5) -> None:
    """``gray``: bytes, rows by columns; each becomes a square of ``scale`` pixels."""
    gray = gray.repeat_interleave(scale, 0).repeat_interleave(scale, 1)
    rows = b"".join(b"\0" + bytes(row.tolist()) for row in gray)
    height, width = gray.shape

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)


@rank_zero_only
def print_reports(module: DigitsGAN) -> None:
    for name, report in zip(("generator", "discriminator"), module.reports, strict=True):
        print(
            f"{name}: {report.step} steps; the last had {report.backwards} backward(s), {report.reductions} reduction,"
            f" and sent {report.bytes_sent / 1e3:.1f} kB per rank, {report.ratio:.2f} times the floor"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2, help="ZeRO stage (default: 2)")
    parser.add_argument("--devices", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=3000, help="batches (default: 3000)")
    parser.add_argument("--out", type=Path, default=OUT / "digits.png", help="(default: %(default)s)")
    options = parser.parse_args()

    warnings.filterwarnings("ignore", module="(lightning|torch|deepspeed)")
    for name in ("lightning.pytorch", "lightning.fabric", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if options.accelerator == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // options.devices))

    torch.manual_seed(0)
    module = DigitsGAN(options.steps)
    trainer = Trainer(
        accelerator=options.accelerator, devices=options.devices, strategy=ZeroSyncStrategy(stage=options.stage),
        max_epochs=1, use_distributed_sampler=False, logger=False, enable_checkpointing=False,
        enable_model_summary=False,
    )  # fmt: skip
    torch.manual_seed(1 + trainer.global_rank)  # noise and dropout differ between the ranks
    trainer.fit(module)
    write_png(options.out, module.picture)
    print_reports(module)


if __name__ == "__main__":
    main()
