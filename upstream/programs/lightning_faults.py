"""What stock Lightning with DeepSpeed gets wrong without an error, each as its smallest program, against plain torch.

    torchrun --nproc_per_node 2 upstream/programs/lightning_faults.py [--arms stock,loop,zerosync] [NAME ...]

``stock`` is Lightning's own strategy, without its gate against CPUs. ``loop`` is the same with the accumulation
contract of ``lightning-accumulation-contract.patch``: the Trainer's loop counts. ``zerosync`` is ZeroSync's strategy.
"""

import argparse
import copy
import logging
import os
import warnings
from typing import Any

import torch
from faults import report
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from zerosync_strategy import ZeroSyncStrategy
from zerosync_strategy.lightning.deepspeed import DeepSpeedAnyDeviceStrategy

RANK, WORLD, ARM = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), "stock"


class LoopStrategy(DeepSpeedAnyDeviceStrategy):
    accumulates_in_engine = False

    def _format_config(self) -> None:
        super()._format_config()
        assert isinstance(self.config, dict)
        self.config["managed_gradient_accumulation"] = False  # each step of the engine uses all backwards before it


class Automatic(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return (self.net(batch) - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Automatic):
    """Accumulates over four batches, as Lightning's documentation shows it."""

    clip = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx) / 4)
        if (batch_idx + 1) % 4 == 0:
            if self.clip:
                self.clip_gradients(optimizer, self.clip, "norm")
            optimizer.step()
            optimizer.zero_grad()


class Clipped(Manual):
    clip = 0.01


def fit(module: Automatic, batches: int, **options: Any) -> tuple[Automatic, list[torch.Tensor]]:
    """Train on so many batches of one sample per rank; return the module as it was before, and the global batches."""
    before = copy.deepcopy(module)
    data = torch.randn(batches * WORLD, 6, generator=torch.Generator().manual_seed(1))
    strategies = {"stock": DeepSpeedAnyDeviceStrategy, "loop": LoopStrategy, "zerosync": ZeroSyncStrategy}
    Trainer(
        strategy=strategies[ARM](stage=2), accelerator="cpu", devices=WORLD, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, **options,
    ).fit(module, DataLoader(data, batch_size=1, sampler=range(RANK, len(data), WORLD)))  # fmt: skip
    return before, list(data.split(WORLD))


def apart(module: Automatic, plain: Automatic) -> float:
    return max((a - b).abs().max().item() for a, b in zip(module.parameters(), plain.parameters(), strict=True))


def in_plain_torch(plain: Automatic, batches: list[torch.Tensor], max_norm: float = 0.0) -> Automatic:
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number, batch in enumerate(batches, 1):
        ((plain.net(batch) - 1).square().mean() / 4).backward()
        if number % 4 == 0 or number == len(batches):
            if max_norm:
                nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    return plain


def accumulation() -> float:
    """accumulate_grad_batches=4: the loss is divided by 4 twice."""
    module = Automatic()
    return apart(module, in_plain_torch(*fit(module, 8, accumulate_grad_batches=4)))


def end_of_an_epoch() -> float:
    """accumulate_grad_batches=4 and 6 batches: Lightning steps on the last batch, and this strategy does not."""
    module = Automatic()
    return apart(module, in_plain_torch(*fit(module, 6, accumulate_grad_batches=4)))


def manual_accumulation() -> float:
    """Manual optimization over four batches: on stages 1 and 2, the step has the gradient of the last one alone."""
    module = Manual()
    return apart(module, in_plain_torch(*fit(module, 8)))


def manual_clipping() -> float:
    """self.clip_gradients() in manual optimization clips nothing; the module's four batches accumulate."""
    module = Clipped()
    return apart(module, in_plain_torch(*fit(module, 8), max_norm=Clipped.clip))


PROGRAMS = (accumulation, end_of_an_epoch, manual_accumulation, manual_clipping)


def main() -> None:
    global ARM
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default="stock")
    parser.add_argument("names", nargs="*", default=[program.__name__ for program in PROGRAMS])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for ARM in options.arms.split(","):
        report(PROGRAMS, options.names, f"{ARM}: ")


if __name__ == "__main__":
    main()
