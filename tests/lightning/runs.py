"""A small LightningModule, its data, and one way to run it: what every Lightning test shares."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, Sampler

from tests.harness import problem
from tests.harness.oracle import Oracle, full_parameters
from tests.harness.problem import MICRO, WORLD, backward_of, loss_of, network, sgd
from zerosync_strategy.lightning import DeepSpeedAnyDeviceStrategy, ZeroSyncStrategy

STOCK = bool(os.environ.get("ZEROSYNC_TEST_STOCK"))


class Data(problem.Data):
    """As every rank's DataLoader."""

    def loader(self) -> DataLoader:
        return DataLoader(self, batch_size=MICRO, sampler=_RankSampler(self.batches))


class _RankSampler(Sampler):
    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[int]:
        rank = int(os.environ["RANK"])
        for batch in range(self.batches):
            yield from range(MICRO * (WORLD * batch + rank), MICRO * (WORLD * batch + rank + 1))

    def __len__(self) -> int:
        return self.batches * MICRO


class PositionedLoader(DataLoader):
    """A loader with a position to save and restore; Lightning finds it by these two methods."""

    def __init__(self, data: Data) -> None:
        self.position = 0
        super().__init__(data, batch_size=MICRO, sampler=_RankSampler(data.batches))

    def __iter__(self) -> Any:
        start = self.position % len(self)
        for index, batch in enumerate(super().__iter__()):
            if index >= start:
                self.position = index + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class WholeLoader(PositionedLoader):
    """Of the global batch, for one process."""

    def __init__(self, batches: int) -> None:
        self.position = 0
        DataLoader.__init__(self, Data(batches), batch_size=MICRO * WORLD)


class Module(LightningModule):
    """Automatic optimization; tests subclass it for anything else.

    Attributes:
        says_more: under manual optimization, the first backward is said not to be the last.
    """

    says_more = True

    def __init__(self, optimizer: Callable[[Any], torch.optim.Optimizer] = sgd) -> None:
        super().__init__()
        self.net = network()
        self.make_optimizer = optimizer

    def on_train_start(self) -> None:
        if self.says_more and not self.automatic_optimization:
            for zerosync in getattr(self.trainer.strategy, "zerosyncs", ()):
                zerosync.window.expect_last(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = loss_of(self.net, batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.net, batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", loss_of(self.net, batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


class Recorder(Callback):
    """What a run left: full parameters, reports of every step, and the counts that must agree."""

    def __init__(self) -> None:
        self.parameters: dict[str, torch.Tensor] = {}
        self.reports: list[Any] = []
        self.steps: list[tuple[int, int]] = []  # (Lightning's global step, the engine's) after each batch

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        zerosync = getattr(trainer.strategy, "zerosync", None)
        if zerosync is not None and zerosync.report is not None and zerosync.report not in self.reports:
            self.reports.append(zerosync.report)
        self.steps.append((trainer.global_step, trainer.strategy.deepspeed_engine.global_steps))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.parameters = {name.removeprefix("net."): p for name, p in full_parameters(pl_module).items()}


class SaveAfter(Callback):
    def __init__(self, batch: int, path: Path, epoch: int = 0) -> None:
        self.batch, self.path, self.epoch = batch, path, epoch
        self.warnings: list[str] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == self.epoch and batch_idx == self.batch:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                trainer.save_checkpoint(self.path)
            self.warnings = [str(warning.message) for warning in caught]


def assert_one_reduction_per_step(recorder: Recorder, backwards: list[int]) -> None:
    """One report per optimizer step, with these backwards and one reduction; and all counts of steps agree."""
    if STOCK:
        return  # has no reports; what the tests look for there is the difference to the oracle
    assert all(lightning == engine for lightning, engine in recorder.steps), recorder.steps
    assert [(report.backwards, report.reductions) for report in recorder.reports] == [(n, 1) for n in backwards]


def make_trainer(strategy: Any, callbacks: list[Any] | None = None, **options: Any) -> Trainer:
    """A quiet CPU Trainer over the ranks of this job."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
    defaults: dict[str, Any] = dict(
        accelerator="cpu", devices=WORLD, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, use_distributed_sampler=False,
    )  # fmt: skip
    return Trainer(strategy=strategy, callbacks=callbacks, **{**defaults, **options})


def fit(module: LightningModule, strategy_: Any, batches: int = 12, **options: Any) -> tuple[Recorder, Trainer]:
    """Train `module` and return what was recorded."""
    recorder = Recorder()
    trainer = make_trainer(strategy_, [recorder, *options.pop("callbacks", [])], **options)
    data = Data(batches)
    trainer.fit(module, data.loader(), data.loader())
    return recorder, trainer


def strategy(stage: int, **options: Any) -> Any:
    """The strategy under test: ours, or with `pytest --stock` Lightning's own, to show what the tests find there."""
    if STOCK:
        return DeepSpeedAnyDeviceStrategy(stage=stage, **options)
    return ZeroSyncStrategy(stage=stage, **options)


def accumulate(
    oracle: Oracle, batches: int, every: int | Callable[[int], int], epochs: int = 1, clip: float = 0.0,
    after_step: Callable[[], None] = lambda: None, after_epoch: Callable[[], None] = lambda: None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Lightning's automatic optimization: a step every so many batches, and one for the tail of each epoch."""
    for epoch in range(epochs):
        n = every(epoch) if callable(every) else every
        for batch in range(batches):
            backward_of(oracle, batch, n)
            if (batch + 1) % n == 0 or batch + 1 == batches:
                oracle.step(clip)
                after_step()
        after_epoch()
    return full_parameters(oracle.module)
