"""Averages of the parameters under Accelerate, over a checkpoint (N1)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.accelerate.runs import start
from tests.harness.extended import STAGES
from tests.harness.oracle import distance, full_average, full_parameters
from tests.harness.problem import adamw, backward_of, loss_of, network, oracle
from tests.harness.ranks import run_ranks


def averaged(net: torch.nn.Module) -> AveragedModel:
    return AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.7))


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_averaged_model_over_a_checkpoint(stage: int, tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}

    def job() -> Any:
        average = averaged(network())
        run = start(stage, optimizer=adamw, hf_ds_config=config | {"train_micro_batch_size_per_gpu": 1})
        run.accelerator.register_for_checkpointing(average)
        for k in range(6):
            run.accelerator.backward(loss_of(run.model, run.batch(k % 4)))
            run.optimizer.step()
            run.optimizer.zero_grad()
            average.update_parameters(run.model)
            if k == 3:
                run.accelerator.save_state(str(tmp_path))
            if k == 4:  # once more, from the checkpoint
                run.accelerator.load_state(str(tmp_path))
        return full_parameters(average.module), run.parameters()

    expected = oracle(adamw)
    average = averaged(expected.module)
    for k in (0, 1, 2, 3, 1):
        backward_of(expected, k)
        expected.step()
        average.update_parameters(expected.module)
    for of_average, of_model in run_ranks(job):
        assert distance(of_average, full_average(average.module, expected.module)) == 0.0
        assert distance(of_model, full_parameters(expected.module)) == 0.0
