"""Losses that run their backwards inside a backward, through ``manual_backward``."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.harness import contrastive
from tests.harness.oracle import distance
from tests.harness.ranks import run_ranks
from tests.lightning.runs import Module, Recorder, make_trainer, strategy

STEPS = 3


class Contrastive(Module):
    def __init__(self, loss_of: Any) -> None:
        super().__init__()
        self.net = contrastive.encoder()
        self.loss_of = loss_of
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss_of(self.net, contrastive.pairs(batch_idx, self.global_rank)))
        self.optimizers().step()
        self.optimizers().zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return contrastive.optimizer(self)


@pytest.mark.extended
@pytest.mark.parametrize(("loss_of", "stage"), [(contrastive.hook_loss, 3), (contrastive.function_loss, 2)])
def test_cached_gradients_are_those_of_plain_torch(loss_of: Any, stage: int) -> None:
    def job() -> Any:
        recorder = Recorder()
        make_trainer(strategy(stage), [recorder]).fit(Contrastive(loss_of), DataLoader(range(STEPS)))
        assert [reports.reductions for reports in recorder.reports] == [1] * STEPS
        return recorder.parameters

    expected = contrastive.plain_training(STEPS)
    for parameters in run_ranks(job):
        assert distance(parameters, expected) == 0.0
