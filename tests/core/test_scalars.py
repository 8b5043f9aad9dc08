"""Parameters without dimensions train and are saved as all others, under every framework."""

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from tests.accelerate import runs as accelerate_runs
from tests.harness import problem
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.problem import Data, adamw, loss_of
from tests.harness.ranks import run_ranks
from tests.lightning import runs as lightning_runs
from zerosync_strategy import ZeroSyncStrategy, attach, prepare_cpu

ALL_SHARDED = {"stage3_param_persistence_threshold": 0}


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = problem.network()
        self.scale = torch.nn.Parameter(torch.tensor(0.3))
        self.unused = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.scale.exp()


def expected(batches: int) -> dict[str, torch.Tensor]:
    module, data = Scaled(), Data(batches)
    oracle = Oracle(module, adamw(module.parameters()))
    for batch in range(batches):
        oracle.backward(lambda rank, batch=batch: loss_of(module, data.batch(batch, rank)))
        oracle.step()
    assert module.scale != 0.3
    return full_parameters(module)


@pytest.mark.parametrize(("stage", "zero"), [(1, {}), (2, {}), (3, {}), (3, ALL_SHARDED)])
def test_plain_deepspeed_and_its_checkpoint(stage: int, zero: dict[str, Any], tmp_path: Path) -> None:
    def engine() -> Any:
        config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
        config["zero_optimization"] |= zero
        module = Scaled()
        engine, *_ = deepspeed.initialize(model=module, optimizer=adamw(module.parameters()), config=config)
        attach(engine)
        return engine

    def run() -> float:
        prepare_cpu()
        deepspeed.init_distributed("gloo")
        first, data = engine(), Data(4)
        for batch in range(4):
            if batch == 2:
                first.save_checkpoint(tmp_path)
                second = engine()
                second.load_checkpoint(tmp_path)
                first.destroy()
                first = second
            first.backward(loss_of(first, data.batch(batch, torch.distributed.get_rank())))
            first.step()
        return distance(full_parameters(first.module), expected(4))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.parametrize("sharded_from_the_start", [False, True])
def test_lightning(sharded_from_the_start: bool) -> None:
    class Module(lightning_runs.Module):
        def __init__(self) -> None:
            super().__init__(adamw)
            self.net = None if sharded_from_the_start else Scaled()

        def configure_model(self) -> None:
            self.net = self.net or Scaled()

    def run() -> float:
        recorder, _ = lightning_runs.fit(Module(), ZeroSyncStrategy(config={"zero_optimization": ALL_SHARDED}), 4)
        return distance(recorder.parameters, expected(4))

    assert run_ranks(run) == [0.0, 0.0]


def test_accelerate() -> None:
    def run() -> float:
        training = accelerate_runs.start(3, batches=4, optimizer=adamw, make=Scaled)
        for batch in range(4):
            training.accelerator.backward(loss_of(training.model, training.batch(batch)))
            training.optimizer.step()
            training.optimizer.zero_grad()
        return distance(training.parameters(), expected(4))

    assert run_ranks(run) == [0.0, 0.0]
