"""Lightning's finetuning callbacks: against Lightning in one process on the global batch, with plain torch (N1)."""

import abc
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

from tests.harness.extended import STAGES
from tests.harness.oracle import distance, full_parameters
from tests.harness.problem import MICRO, WORLD, loss_of
from tests.harness.ranks import run_ranks
from tests.harness.rounding import bounded
from tests.lightning.runs import Data, Module, PositionedLoader, SaveAfter, WholeLoader, make_trainer, strategy
from zerosync_strategy import CheckpointError
from zerosync_strategy.lightning import ZeroSyncStrategy

BATCHES = 4


class Tuned(Module):
    """A head, and a backbone of three layers that starts frozen."""

    def __init__(self, backbone_is_held: bool = True) -> None:
        super().__init__()
        layers = list(self.net)
        self.backbone, self.head = nn.Sequential(*layers[:3]), nn.Sequential(*layers[3:])
        self.net = nn.Sequential(self.backbone, self.head)
        self.backbone_is_held = backbone_is_held

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.head.parameters()}, {"params": self.backbone.parameters(), "lr": 0.001}]
        return torch.optim.AdamW(groups[: 1 + self.backbone_is_held], lr=0.01, weight_decay=0.1)


Epoch = TypeVar("Epoch")


class Scheduled(abc.ABC):
    @abc.abstractmethod
    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None: ...


@dataclasses.dataclass
class ByLayer(Scheduled, Generic[Epoch], BaseFinetuning):
    """Thaws the last layer of the backbone in the second epoch, and the first in the third.

    What comes before Lightning's class, and cannot be hashed, are as in finetuning-scheduler.
    """

    def __post_init__(self) -> None:
        BaseFinetuning.__init__(self)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        trainer.epochs_at_setup = (trainer.max_epochs, trainer.strategy.root_device)

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        layers = {1: pl_module.backbone[2], 2: pl_module.backbone[0]}
        if epoch in layers:
            self.unfreeze_and_add_param_group(layers[epoch], optimizer)


def backbone() -> BaseFinetuning:
    return BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.005, lambda_func=lambda _: 1.5)


@pytest.mark.extended
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("make", [backbone, ByLayer])
def test_thawing(stage: int, make: Callable[[], BaseFinetuning]) -> None:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}

    def run(in_one_process: bool) -> Any:
        module, data = Tuned(), Data(BATCHES)
        plain = strategy(stage, config={"zero_optimization": zero}) if not in_one_process else "auto"
        loader = DataLoader(data, batch_size=MICRO * WORLD) if in_one_process else data.loader()
        trainer = make_trainer(plain, [make()], max_epochs=4, devices=1 if in_one_process else WORLD)
        trainer.fit(module, loader)
        return full_parameters(module), [group["lr"] for group in trainer.optimizers[0].param_groups]

    ((expected, rates),) = run_ranks(lambda: bounded(lambda: run(True)), world_size=1)
    for found, found_rates in run_ranks(run, False):
        assert distance(found, expected) == 0.0 and found_rates == rates


@pytest.mark.extended(but=("thawed-3",))
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("epoch", [0, 2], ids=["frozen", "thawed"])
def test_resume(stage: int, epoch: int, tmp_path: Path) -> None:
    """Lightning leaves what was thawed before the checkpoint frozen when it resumes, and so do we."""

    def run(in_one_process: bool) -> Any:
        results = []
        path = tmp_path / str(in_one_process)
        for options in ({}, {"ckpt_path": path}):
            callbacks = [backbone(), *([] if options else [SaveAfter(1, path, epoch)])]
            trains_with = "auto" if in_one_process else strategy(stage)
            trainer = make_trainer(trains_with, callbacks, max_epochs=4, devices=1 if in_one_process else WORLD)
            loader = WholeLoader(BATCHES) if in_one_process else PositionedLoader(Data(BATCHES))
            trainer.fit(module := Tuned(), loader, **options)
            results.append(full_parameters(module))
        return results

    (expected,) = run_ranks(lambda: bounded(lambda: run(True)), world_size=1)
    for found in run_ranks(run, False):
        assert [distance(*pair) for pair in zip(found, expected, strict=True)] == [0.0, 0.0]


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_that_are_added_later(stage: int) -> None:
    """An error when they are added; at the start of the training, one of Lightning's own callback, else a warning."""

    class Trains(ByLayer):
        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            self.make_trainable(pl_module.head)

    class Adds(Trains):
        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            optimizer.add_param_group({"params": list(pl_module.backbone.parameters())})

    class NeverAdds(Trains):
        def unfreeze_backbone(self, pl_module: Any, optimizer: Any) -> None:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)

    def run() -> None:
        def fit(callback: BaseFinetuning) -> None:
            trainer = make_trainer(strategy(stage), [callback], max_epochs=2)
            trainer.fit(Tuned(backbone_is_held=False), Data(BATCHES).loader())

        may_add = r"has frozen 4 parameters that are not in the optimizer.* in configure_optimizers\(\)"
        with pytest.raises(MisconfigurationException, match=may_add):
            fit(backbone())
        for adds in (ByLayer(), Adds()):
            with (
                pytest.warns(UserWarning, match=may_add),
                pytest.raises(ValueError, match=r"add_param_group\(\) was called .* Give the optimizer all parameters"),
            ):
                fit(adds)
        for trains in (Trains(), NeverAdds()):
            with pytest.warns(UserWarning, match=may_add):
                fit(trains)

    run_ranks(run)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_without_frozen_parameters(stage: int, tmp_path: Path) -> None:
    class Adapted(Tuned):
        """Of which only the head is trained, and saved."""

        def __init__(self) -> None:
            super().__init__(backbone_is_held=False)
            self.backbone.requires_grad_(False)

    def train(path: Path | None = None, epochs: int = 2, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        trainer = make_trainer(ZeroSyncStrategy(stage=stage, **options), [], max_epochs=epochs)
        trainer.fit(module := Adapted(), PositionedLoader(Data(BATCHES)), ckpt_path=path)
        return trainer, full_parameters(module)

    def run() -> list[float]:
        path, excludes = tmp_path / "saved", {"exclude_frozen_parameters": True}
        _, whole = train()
        saved, _ = train(epochs=1, **excludes)
        saved.save_checkpoint(path)
        _, resumed = train(path, **excludes)
        tester = make_trainer(ZeroSyncStrategy(stage=stage, **excludes), [])
        tester.test(Adapted(), Data(BATCHES).loader(), ckpt_path=path, verbose=False)
        loss = float(tester.callback_metrics["test_loss"])
        saved.test(saved.lightning_module, Data(BATCHES).loader(), verbose=False)
        with pytest.raises(CheckpointError, match=r"no frozen parameters, such as 'net.0.0.*strict_loading") as error:
            train(path)
        assert "number of ranks" not in str(error.value)
        return [distance(resumed, whole), abs(loss - float(saved.callback_metrics["test_loss"]))]

    assert run_ranks(run) == [[0.0, 0.0], [0.0, 0.0]]
