"""``from_pretrained`` of transformers in ``configure_model``, where ZeRO-3 shards what is built."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from transformers.integrations import is_deepspeed_zero3_enabled

from tests.harness.extended import STAGES
from tests.harness.llama import BACKWARDS, STEPS, loss_of, plain_torch, save, sgd
from tests.harness.oracle import distance
from tests.harness.ranks import run_ranks
from tests.lightning.runs import Recorder, make_trainer
from zerosync_strategy import ZeroSyncStrategy


class Module(LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.net = folder, None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = AutoModelForCausalLM.from_pretrained(self.folder)

    def training_step(self, _: Any, batch_idx: int) -> torch.Tensor:
        return BACKWARDS * loss_of(self.net, batch_idx, self.global_rank)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


@pytest.mark.extended
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_that_is_read_in_configure_model(stage: int, tmp_path: Path) -> None:
    """Stock: "ignore_mismatched_sizes", for transformers finds parameters of no elements."""

    def train() -> dict[str, torch.Tensor]:
        trainer = make_trainer(
            ZeroSyncStrategy(stage=stage), [recorder := Recorder()], accumulate_grad_batches=BACKWARDS
        )
        module = Module(tmp_path)
        trainer.fit(module, DataLoader(range(STEPS * BACKWARDS)))
        assert all(hasattr(param, "ds_id") for param in module.parameters()) is (stage == 3)
        assert not is_deepspeed_zero3_enabled()  # what is read elsewhere is whole
        return recorder.parameters

    (expected,) = run_ranks(plain_torch, save(tmp_path), world_size=1)
    assert [distance(parameters, expected) for parameters in run_ranks(train)] == [0.0, 0.0]
