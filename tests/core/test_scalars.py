"""Parameters without dimensions train and are saved as all others, under every framework."""

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from tests.accelerate import runs as accelerate_runs
from tests.harness import problem
from tests.harness.engines import make_engine
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
    oracle.train(lambda module, batch, rank: loss_of(module, data.batch(batch, rank)), batches)
    assert module.scale != 0.3
    return full_parameters(module)


@pytest.mark.extended(but=("3-zero3",))
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


@pytest.mark.extended(but=("dtype1-sharded",))
@pytest.mark.parametrize("zero", [{}, ALL_SHARDED], ids=["persistent", "sharded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_saved_model(dtype: torch.dtype, zero: dict[str, Any], tmp_path: Path) -> None:
    """Of stage 3: DeepSpeed gathers each parameter for rank 0, as if it changed them."""

    def run() -> None:
        net = Scaled()
        options = {**zero, "stage3_gather_16bit_weights_on_model_save": True}
        engine = make_engine(net, adamw(net.parameters()), 3, options, bf16={"enabled": dtype is torch.bfloat16})
        attach(engine)
        for batch in range(2):
            x, y = Data(2).batch(batch, torch.distributed.get_rank())
            engine.backward(loss_of(engine, (x.to(dtype), y.to(dtype))))
            engine.step()
            engine.save_16bit_model(tmp_path)
            with deepspeed.zero.GatheredParameters([net.unused], modifier_rank=0):
                net.unused.data.fill_(batch if torch.distributed.get_rank() == 0 else 9)
        trained = full_parameters(net)
        assert trained["unused"] == 1
        engine.save_16bit_model(tmp_path)
        torch.distributed.barrier()
        saved = torch.load(tmp_path / "pytorch_model.bin")
        assert {name: (value.shape, value.float().tolist()) for name, value in saved.items()} == {
            name: (value.shape, value.tolist()) for name, value in trained.items()
        }

    run_ranks(run)


@pytest.mark.extended(but=("True",))
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


@pytest.mark.extended
def test_accelerate() -> None:
    def run() -> float:
        training = accelerate_runs.start(3, batches=4, optimizer=adamw, make=Scaled)
        for batch in range(4):
            training.accelerator.backward(loss_of(training.model, training.batch(batch)))
            training.optimizer.step()
            training.optimizer.zero_grad()
        return distance(training.parameters(), expected(4))

    assert run_ranks(run) == [0.0, 0.0]
