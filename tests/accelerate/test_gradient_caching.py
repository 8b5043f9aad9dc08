"""Losses that run their backwards inside a backward: right, and one reduction per optimizer step."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator

from tests.harness import contrastive
from tests.harness.oracle import distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import ZeroSyncPlugin

STEPS = 3


@pytest.mark.extended(but=("engine in the loss-function_loss-2",))
@pytest.mark.parametrize(
    ("how", "loss_of", "stage"),  # every pair of values
    [
        ("accelerator", contrastive.hook_loss, 3),
        ("accelerator", contrastive.function_loss, 2),
        ("raw", contrastive.hook_loss, 2),
        ("raw", contrastive.function_loss, 3),
        ("engine in the loss", contrastive.hook_loss, 3),
        ("engine in the loss", contrastive.function_loss, 2),
    ],
)
def test_cached_gradients_are_those_of_plain_torch(how: str, loss_of: Any, stage: int) -> None:
    def job() -> Any:
        accelerator = Accelerator(deepspeed_plugin=ZeroSyncPlugin(stage=stage))
        model = contrastive.encoder()
        engine, optimizer = accelerator.prepare(model, contrastive.optimizer(model))
        reports = []
        accelerator.deepspeed_engine_wrapped.zerosync.window.expect_last(False)
        for step in range(STEPS):
            used = _Indexed(engine) if how == "engine in the loss" else model
            loss = loss_of(used, contrastive.pairs(step, accelerator.process_index))
            loss.backward() if how == "raw" else accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            report = accelerator.deepspeed_engine_wrapped.zerosync.report
            reports.append((report.backwards, report.reductions))
        return full_parameters(model), reports

    expected = contrastive.plain_training(STEPS)
    for parameters, reports in run_ranks(job):
        assert distance(parameters, expected) == 0.0
        assert [reductions for _, reductions in reports] == [1] * STEPS


class _Indexed(torch.nn.Module):
    """The engine as the loss's model, as sentence-transformers' own trainer gives it."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self.engine = engine

    def __getitem__(self, index: int) -> Any:
        return self.engine.module[index]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)
