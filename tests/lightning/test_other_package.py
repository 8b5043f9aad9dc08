"""The Trainer of `pytorch_lightning`, the other package of the same library: the same files, and the same results."""

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks

import zerosync_strategy.lightning
from tests.harness.oracle import distance, full_parameters
from tests.harness.problem import WORLD, adamw, loss_of, network, oracle
from tests.harness.ranks import run_ranks
from tests.harness.releases import since
from tests.lightning.runs import Data, accumulate
from zerosync_strategy.pytorch_lightning import ZeroSyncMonitor, ZeroSyncStrategy


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return loss_of(self.net, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.net, batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return adamw(self.parameters())


def trainer(strategy: Any, **options: Any) -> pl.Trainer:
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module="pytorch_lightning")
    defaults: dict[str, Any] = dict(
        accelerator="cpu", devices=WORLD, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, use_distributed_sampler=False,
    )  # fmt: skip
    return pl.Trainer(strategy=strategy, **{**defaults, **options})


def parameters(module: Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("net."): param for name, param in full_parameters(module).items()}


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_automatic_optimization(stage: int, tmp_path: Path) -> None:
    """By name, with accumulation, clipping, validation in mid-window and the monitor; then resumed."""

    def run() -> Any:
        data, module = Data(10), Module()
        options: dict[str, Any] = dict(accumulate_grad_batches=4, gradient_clip_val=0.05, val_check_interval=5)
        first = trainer(f"zerosync_stage_{stage}", callbacks=[ZeroSyncMonitor()], **options)
        first.fit(module, data.loader(), data.loader())
        report = first.strategy.zerosync.report
        assert isinstance(first.strategy, ZeroSyncStrategy) and (report.backwards, report.reductions) == (2, 1)
        assert first.callback_metrics["zerosync/reductions"] == 1
        error = distance(parameters(module), accumulate(oracle(adamw), 10, 4, clip=0.05))
        first.save_checkpoint(tmp_path / "run.ckpt")

        module = Module()
        again = trainer(ZeroSyncStrategy(stage=stage), **options | {"max_epochs": 2})
        again.fit(module, data.loader(), data.loader(), ckpt_path=tmp_path / "run.ckpt")
        resumed = distance(parameters(module), accumulate(oracle(adamw), 10, 4, epochs=2, clip=0.05))
        return error, resumed

    assert run_ranks(run, timeout=60) == [(0.0, 0.0)] * 2


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", [2, 3])
def test_manual_optimization_of_two_optimizers(stage: int) -> None:
    class Manual(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[part].parameters(), lr=0.5) for part in (slice(0, 2), slice(2, 5))]

        def on_train_start(self) -> None:
            for zerosync in self.trainer.strategy.zerosyncs:
                zerosync.window.expect_last(False)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(loss_of(self.net, batch) / 2)
            if batch_idx % 2:
                for optimizer in self.optimizers():
                    optimizer.step()
                    optimizer.zero_grad()

    def run() -> float:
        module = Manual()
        trainer(ZeroSyncStrategy(stage=stage)).fit(module, Data(8).loader())
        return distance(parameters(module), accumulate(oracle(), 8, 2))

    assert run_ranks(run, timeout=60) == [0.0, 0.0]


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", [2, 3])
def test_callbacks_that_lightning_refuses_with_deepspeed(stage: int) -> None:
    """They are known by their classes, which are those of this package."""

    class Backbone(Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = self.net[0]

        def configure_optimizers(self) -> Any:
            head = [param for name, param in self.named_parameters() if "net.0" not in name and "backbone" not in name]
            return torch.optim.SGD([{"params": head}, {"params": list(self.backbone.parameters())}], lr=0.5)

    def run() -> None:
        scheduler = callbacks.GradientAccumulationScheduler({0: 4})
        scheduled = trainer(ZeroSyncStrategy(stage=stage), callbacks=[scheduler])
        scheduled.fit(Module(), Data(4).loader())
        assert scheduled.strategy.zerosync.report.backwards == 4
        finetuning = callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1)
        trainer(ZeroSyncStrategy(stage=stage), callbacks=[finetuning], max_epochs=2).fit(Backbone(), Data(4).loader())

    run_ranks(run, timeout=60)


@pytest.mark.extended(but=("2",))
@since("2.6", "it averages no weights", package="lightning")
@pytest.mark.parametrize("stage", [2, 3])
def test_averaging_of_weights_which_lightning_refuses_with_deepspeed(stage: int) -> None:
    def run() -> None:
        averaging = callbacks.EMAWeightAveraging(decay=0.5)
        trainer(ZeroSyncStrategy(stage=stage), callbacks=[averaging]).fit(Module(), Data(4).loader())

    run_ranks(run, timeout=60)


def test_a_strategy_of_the_other_package_says_what_to_import() -> None:
    """Both ways round, and with Fabric."""
    from lightning.fabric import Fabric
    from lightning.pytorch import Trainer
    from lightning_fabric import Fabric as OtherFabric

    lightnings = zerosync_strategy.lightning.ZeroSyncStrategy(stage=3)
    with pytest.raises(ValueError, match=r"from zerosync_strategy\.pytorch_lightning import ZeroSyncStrategy"):
        trainer(lightnings)
    with pytest.raises(ValueError, match=r"from zerosync_strategy\.lightning import ZeroSyncStrategy"):
        Trainer(strategy=ZeroSyncStrategy(stage=3), accelerator="cpu")
    with pytest.raises(ValueError, match=r"from zerosync_strategy\.fabric import ZeroSyncFabricStrategy"):
        Fabric(strategy=lightnings, accelerator="cpu")
    with pytest.raises(ValueError, match=r"from zerosync_strategy\.lightning_fabric import ZeroSyncFabricStrategy"):
        OtherFabric(strategy=zerosync_strategy.ZeroSyncFabricStrategy(stage=3), accelerator="cpu")
