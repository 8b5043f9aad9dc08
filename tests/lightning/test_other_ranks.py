"""Under Lightning: a run goes on with another number of ranks, from DeepSpeed's own files."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from tests.harness.oracle import distance
from tests.harness.parts import STEPS, WORLDS, Net, batch, plain_torch, started
from tests.harness.ranks import run_ranks
from tests.lightning.runs import Recorder, make_trainer
from zerosync_strategy import ZeroSyncStrategy


class Module(LightningModule):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def training_step(self, _: Any, batch_idx: int) -> Any:
        step, backward = divmod(batch_idx, 2)
        return 2 * self.net(batch(self.current_epoch * STEPS + step, backward, self.global_rank))

    def configure_optimizers(self) -> Any:
        return self.net.optimizer()


class TwoOptimizers(Module):
    """Each has one of the groups that the only optimizer above has."""

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, _: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(_, batch_idx) / 2)
        if batch_idx % 2:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        groups = self.net.optimizer().param_groups
        return [torch.optim.AdamW([group]) for group in groups]


CASES = [
    *itertools.product([1, 2, 3], [Module, TwoOptimizers], [True]),
    (2, TwoOptimizers, "whole"),
    (3, Module, "whole"),
    (3, TwoOptimizers, "whole"),
]


@pytest.mark.extended(but=("3-TwoOptimizers-True",))
@pytest.mark.parametrize(("stage", "make", "elementwise"), CASES)
def test_other_numbers_of_ranks(stage: int, make: type[Module], elementwise: bool | str, tmp_path: Path) -> None:
    """Each run is one epoch."""

    def train(run: int) -> dict[str, torch.Tensor]:
        strategy = ZeroSyncStrategy(stage=stage, elementwise_optimizer=elementwise)
        trainer = make_trainer(
            strategy, [recorder := Recorder()], devices=int(os.environ["WORLD_SIZE"]), max_epochs=run + 1,
            accumulate_grad_batches=2 if make is Module else 1,
        )  # fmt: skip
        module = make(Net() if run else started(Net()))
        trainer.fit(module, DataLoader(range(2 * STEPS)), ckpt_path=tmp_path / f"run{run - 1}" if run else None)
        assert trainer.global_step == (run + 1) * STEPS * (1 if make is Module else 2)
        trainer.save_checkpoint(tmp_path / f"run{run}")
        return recorder.parameters

    (oracle,) = run_ranks(plain_torch, world_size=1)
    for run, expected in enumerate(oracle):
        ended = run_ranks(train, run, world_size=WORLDS[run])
        assert max(distance(parameters, expected) for parameters in ended) == 0.0
