"""A schedule-free optimizer whose `train()` and `eval()` are called in hooks: against Lightning in one process."""

from typing import Any

import pytest
import torch

from tests.harness.optimizers import ScheduleFree
from tests.harness.oracle import distance, full_parameters
from tests.harness.problem import WORLD
from tests.harness.ranks import run_ranks
from tests.harness.rounding import bounded
from tests.lightning.runs import Data, Module, PositionedLoader, WholeLoader, make_trainer, strategy

BATCHES = 6


class Program(Module):
    """Evaluates in each epoch and, by another way to the optimizer, within one."""

    def __init__(self) -> None:
        super().__init__(ScheduleFree)
        self.seen: dict[str, torch.Tensor] = {}

    def on_train_start(self) -> None:
        self.trainer.optimizers[0].train()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:  # in mid-accumulation
            self.own.eval()
            self.note("batch")
            self.own.train()

    def on_validation_start(self) -> None:
        self.optimizers().eval()

    def on_validation_end(self) -> None:
        self.note("epoch")
        self.seen[f"loss {self.current_epoch}"] = self.trainer.callback_metrics["val_loss"].clone()
        self.optimizers().train()

    def on_train_end(self) -> None:
        self.optimizers().eval()
        self.note("end")

    def note(self, when: str) -> None:
        self.seen |= {f"{when} {self.current_epoch} {name}": p for name, p in full_parameters(self.net).items()}

    def configure_optimizers(self) -> Any:
        self.own = ScheduleFree(self.parameters())
        return self.own


def train(strategy_: Any, devices: int, loader: Any) -> dict[str, torch.Tensor]:
    module = Program()
    trainer = make_trainer(strategy_, max_epochs=2, devices=devices, accumulate_grad_batches=2)
    trainer.fit(module, loader(), loader())
    return module.seen


@pytest.mark.extended
@pytest.mark.parametrize("stage", [2, 3])
def test_in_hooks(stage: int) -> None:
    (expected,) = run_ranks(lambda: bounded(lambda: train("auto", 1, lambda: WholeLoader(BATCHES))), world_size=1)
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    ours = lambda: train(strategy(stage, config=config), WORLD, lambda: PositionedLoader(Data(BATCHES)))  # noqa: E731
    for found in run_ranks(ours):
        assert len(found) == 2 * 6 * 2 + 2 + 6
        assert distance(found, expected) == 0.0
