"""Callbacks that look at the optimizer during training: the learning-rate finder, the monitor of rates and momenta."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner

from tests.harness.oracle import distance
from tests.harness.problem import WORLD, oracle
from tests.harness.ranks import ON_CPU, run_ranks
from tests.harness.releases import since
from tests.lightning.runs import Data, Module, Recorder, accumulate, make_trainer
from zerosync_strategy import ZeroSyncStrategy

BATCHES = 24


def momentum(parameters: Any, lr: float = 0.3) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


class Tuned(Module):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.3

    def configure_optimizers(self) -> Any:
        return momentum(self.parameters(), self.lr)


def find_and_fit(folder: Path, strategy: Any, by_callback: bool) -> Any:
    module, recorder, data = Tuned(), Recorder(), Data(BATCHES)
    options: dict[str, Any] = {"min_lr": 1e-3, "max_lr": 1.0, "early_stop_threshold": None}
    finder = LearningRateFinder(num_training_steps=20, **options)
    trainer = make_trainer(strategy, [*([finder] if by_callback else []), recorder], default_root_dir=folder)
    found = None if by_callback else Tuner(trainer).lr_find(module, data.loader(), num_training=20, **options)
    trainer.fit(module, data.loader())
    assert trainer.global_step == BATCHES
    return recorder.parameters, module.lr, (finder.optimal_lr if by_callback else found).results


def on_ddp(folder: Path) -> Any:
    """What the search finds without DeepSpeed."""
    module, finder = Tuned(), LearningRateFinder(1e-3, 1.0, num_training_steps=20, early_stop_threshold=None)
    make_trainer("ddp", [finder], default_root_dir=folder, max_steps=1).fit(module, Data(BATCHES).loader())
    return module.lr, finder.optimal_lr.results


BY_CALLBACK = since("2.6", "the search by callback ends the training early, under any strategy", package="lightning")


@pytest.mark.extended(but=("2-False",))
@pytest.mark.parametrize(
    ("stage", "by_callback"),
    [pytest.param(1, True, marks=BY_CALLBACK), (2, False), pytest.param(3, True, marks=BY_CALLBACK), (3, False)],
)
def test_the_learning_rate_finder(stage: int, by_callback: bool, tmp_path: Path) -> None:
    """It finds what it finds under DDP, and the training begins where it would without the search, at that rate."""
    rate, results = run_ranks(on_ddp, tmp_path, env=ON_CPU)[0]
    assert rate != 0.3
    expected = accumulate(oracle(lambda parameters: momentum(parameters, rate)), BATCHES, 1)
    for parameters, found, searched in run_ranks(find_and_fit, tmp_path, ZeroSyncStrategy(stage), by_callback):
        # A choice among 20 rates, by the slope of the losses: rounding does not come near the next best.
        assert found == rate and searched["lr"] == results["lr"]
        assert searched["loss"] == pytest.approx(results["loss"], rel=1e-4)
        assert distance(parameters, expected) == 0.0
    assert not list(tmp_path.glob(".lr_find*"))


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", [2, 3])
def test_the_monitor_logs_momenta(stage: int, tmp_path: Path) -> None:
    def run() -> Any:
        monitor = LearningRateMonitor(log_momentum=True)
        options = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1}
        trainer = make_trainer(ZeroSyncStrategy(stage), [monitor], **options)
        trainer.fit(Tuned(), Data(2).loader())
        return [trainer.callback_metrics[name].item() for name in ("lr-SGD", "lr-SGD-momentum")]

    assert run_ranks(run) == [pytest.approx([0.3, 0.9])] * WORLD
