"""Training under each framework is plain torch's, over NCCL between ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.gpu.device import DEVICE, GPUS, needs
from tests.gpu.test_exact import BACKWARDS, STEPS, loss_of, network, sgd
from tests.harness.engines import rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import ZeroSyncFabricStrategy, ZeroSyncPlugin, ZeroSyncStrategy

RANKS = GPUS or 2
Values = dict[str, torch.Tensor]
SHARDED = {"stage3_param_persistence_threshold": 0}


def loss(module: nn.Module, k: int, of_rank: int) -> torch.Tensor:
    return loss_of(module, k, of_rank, torch.float32)


def lightning(stage: int) -> Values:
    """Its accumulation divides each loss by itself."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return BACKWARDS * loss(self.net, batch_idx, rank())

        def configure_optimizers(self) -> Any:
            return sgd(self.parameters())

    module = Module()
    strategy = ZeroSyncStrategy(stage=stage, config={"zero_optimization": {"stage": stage, **SHARDED}})
    trainer = Trainer(
        accelerator=DEVICE, devices=RANKS, strategy=strategy, max_epochs=1, accumulate_grad_batches=BACKWARDS,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, use_distributed_sampler=False,
    )  # fmt: skip
    values: Values = {}
    module.on_train_end = lambda: values.update(full_parameters(module.net))  # type: ignore[method-assign]
    trainer.fit(module, DataLoader(torch.zeros(STEPS * BACKWARDS, 1)))
    return values


def fabric(stage: int) -> Values:
    from lightning.fabric import Fabric

    strategy = ZeroSyncFabricStrategy(stage=stage, config={"zero_optimization": {"stage": stage, **SHARDED}})
    made = Fabric(accelerator=DEVICE, devices=RANKS, strategy=strategy)
    made.launch()
    net = network()
    module, optimizer = made.setup(net, sgd(net.parameters()))
    return _train(module, optimizer, made.backward, net)


def accelerate(stage: int) -> Values:
    from accelerate import Accelerator

    accelerator = Accelerator(deepspeed_plugin=ZeroSyncPlugin(stage=stage))
    net = network()
    module, optimizer, _ = accelerator.prepare(net, sgd(net.parameters()), DataLoader(torch.zeros(8, 1)))
    return _train(module, optimizer, accelerator.backward, net)


def _train(module: Any, optimizer: Any, backward: Callable[[torch.Tensor], None], net: nn.Module) -> Values:
    for step in range(STEPS):
        for k in range(BACKWARDS * step, BACKWARDS * (step + 1)):
            backward(loss(module, k, rank()))
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(net)


@needs(2)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("train", [lightning, fabric, accelerate])
def test_training_is_that_of_plain_torch(train: Callable[[int], Values], stage: int) -> None:
    def job() -> float:
        trained = train(stage)
        plain = network().to(DEVICE)
        oracle = Oracle(plain, sgd(plain.parameters()), RANKS)
        for step in range(STEPS):
            for k in range(BACKWARDS * step, BACKWARDS * (step + 1)):
                oracle.backward(lambda of_rank, k=k: loss(plain, k, of_rank))
            oracle.step()
        return distance(trained, full_parameters(plain))

    assert max(run_ranks(job, world_size=RANKS)) < 1e-5
