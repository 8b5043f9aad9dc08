"""Under Accelerate: a script goes on with another number of ranks, from DeepSpeed's own files."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from tests.harness.engines import rank
from tests.harness.oracle import distance, full_parameters
from tests.harness.parts import STEPS, WORLDS, Net, batch, plain_torch, started
from tests.harness.ranks import run_ranks
from zerosync_strategy import ZeroSyncPlugin


@pytest.mark.extended
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_other_numbers_of_ranks(stage: int, tmp_path: Path) -> None:
    def train(run: int) -> dict[str, torch.Tensor]:
        config = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 2}
        accelerator = Accelerator(deepspeed_plugin=ZeroSyncPlugin(hf_ds_config=config))
        net = Net() if run else started(Net())
        model, optimizer = accelerator.prepare(net, net.optimizer())
        if run:
            accelerator.load_state(str(tmp_path / f"run{run - 1}"))
        for step in range(run * STEPS, (run + 1) * STEPS):
            for backward in range(2):
                accelerator.backward(model(batch(step, backward, rank())))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(str(tmp_path / f"run{run}"))
        return full_parameters(accelerator.unwrap_model(model))

    (oracle,) = run_ranks(plain_torch, world_size=1)
    for run, expected in enumerate(oracle):
        ended = run_ranks(train, run, world_size=WORLDS[run])
        assert max(distance(parameters, expected) for parameters in ended) == 0.0
