"""After a framework's training, nothing of any library or of the process stays replaced (rule C2)."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.accelerate import runs as of_accelerate
from tests.fabric import runs as of_fabric
from tests.harness.ranks import run_ranks
from tests.harness.replaced import differences, snapshot
from tests.lightning import runs as of_lightning

NOT_OURS = {
    "torch.nn.functional.linear",  # ZeRO-3's, as long as the process lives
    "torch.optim.sgd.SGD.step",  # torch's, with the first optimizer of a class
    "torch.optim.sgd.SGD.step.__code__",
    # Lightning's own call.
    "deepspeed.runtime.activation_checkpointing.checkpointing.deepspeed_checkpointing_enabled",
}


def lightning() -> Callable[[], None]:
    _, trainer = of_lightning.fit(of_lightning.Module(), of_lightning.strategy(3), 4)
    strategy: Any = trainer.strategy
    return lambda: [zerosync.detach() for zerosync in strategy.zerosyncs][:0] or None


def lightning_evaluation() -> Callable[[], None]:
    trainer = of_lightning.make_trainer(of_lightning.strategy(3))
    trainer.test(of_lightning.Module(), of_lightning.Data(2).loader(), verbose=False)
    return lambda: None


def fabric() -> Callable[[], None]:
    made = of_fabric.make_fabric(2)
    model, optimizer = of_fabric.trained(made)
    for loss in of_fabric.losses(made, model, range(2)):
        made.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return lambda: made.strategy.zerosync.detach()


def accelerate_start() -> Any:
    run = of_accelerate.start(2)
    loss = torch.nn.functional.mse_loss(*(run.model(run.batch(0)[0]), run.batch(0)[1]))
    run.accelerator.backward(loss)
    run.optimizer.step()
    return run


def accelerate_end() -> Callable[[], None]:
    run = accelerate_start()
    return lambda: run.accelerator.end_training()


def accelerate_free() -> Callable[[], None]:
    run = accelerate_start()
    return lambda: run.accelerator.free_memory() and None


@pytest.mark.extended
@pytest.mark.parametrize("train", [lightning, lightning_evaluation, fabric, accelerate_end, accelerate_free])
def test_nothing_stays_replaced(train: Callable[[], Callable[[], None]]) -> None:
    def run() -> tuple[list[str], list[str]]:
        before = snapshot() if os.environ["RANK"] == "0" else {}
        end = train()
        between = differences(before, snapshot()) if before else []
        end()
        return between, differences(before, snapshot()) if before else []

    between, after = run_ranks(run, timeout=300)[0]
    assert set(after) <= NOT_OURS, after
    assert len(between) > 8 or train is lightning_evaluation, between
