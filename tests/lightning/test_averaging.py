"""Lightning's weight averaging: against Lightning in one process on the global batch, with plain torch (N1)."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.harness.oracle import distance, full_parameters
from tests.harness.problem import WORLD, adamw
from tests.harness.ranks import run_ranks
from tests.harness.rounding import bounded
from tests.lightning.runs import Data, Module, PositionedLoader, SaveAfter, WholeLoader, make_trainer, strategy

BATCHES = 6


class Scheduled(Module):
    """Has a buffer that takes part in the average, and a learning rate by epoch."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.register_buffer("steps", torch.zeros(()))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def on_validation_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["val_loss"]))

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


def sharded(stage: int, **options: Any) -> Any:
    """ZeRO-3 keeps small parameters gathered by default."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return strategy(stage, config={"zero_optimization": zero}, **options)


def after(callback: Any, module: Any) -> dict[str, Any]:
    """What a run has left: the module, the average, and the validation losses."""
    state = {f"module.{name}": value for name, value in full_parameters(module).items()}
    average = callback._average_model
    state |= {f"average.{name}": value.detach().clone() for name, value in average.named_parameters()}
    return state | {"buffer": module.steps.clone(), "losses": torch.tensor(module.losses[-2:])}


def train(
    make: Callable[[], Any], devices: int, strategy: Callable[[], Any], path: Path, loader: Callable[[], Any]
) -> list[dict[str, Any]]:
    """Train and save in mid-epoch, and resume from there."""
    results = []
    for options in ({"callbacks": [SaveAfter(3, path, 2)]}, {"ckpt_path": path}):
        module, callback = Scheduled(), make()
        callbacks = [callback, *options.pop("callbacks", [])]
        trainer = make_trainer(strategy(), callbacks, max_epochs=4, devices=devices)
        trainer.fit(module, loader(), loader(), **options)
        assert type(callback) is type(make())
        results.append(after(callback, module))
    return results


def ema() -> Callback:
    return EMAWeightAveraging(decay=0.7, update_starting_at_step=1)


def swa() -> Callback:
    return StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2, annealing_epochs=2, annealing_strategy="linear")


@pytest.mark.extended(but=("3-ema",))
@pytest.mark.parametrize(("stage", "make"), [(1, ema), (2, ema), (3, ema), (3, WeightAveraging), (2, swa), (3, swa)])
def test_training_checkpoint_and_resume(stage: int, make: Callable[[], Any], tmp_path: Path) -> None:
    def run() -> Any:
        return train(make, WORLD, lambda: sharded(stage), tmp_path / "mid", lambda: PositionedLoader(Data(BATCHES)))

    def in_one_process() -> Any:
        return train(make, 1, lambda: "auto", tmp_path / "plain.ckpt", lambda: WholeLoader(BATCHES))

    (expected,) = run_ranks(lambda: bounded(in_one_process), world_size=1)
    for found in run_ranks(run):
        assert [distance(*pair) for pair in zip(found, expected, strict=True)] == [0.0, 0.0]
        if make is not swa:  # whose scheduler Lightning forgets when it resumes in mid-epoch
            # To the bit: both make the same operations, from the same bits on the same layout.
            assert distance(found[0], found[1]) == 0.0


class Normalised(Scheduled):
    """Its statistics take no part in the loss, or each rank's would differ from those of the global batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(16, affine=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.norm(batch[0])
        return super().training_step(batch, batch_idx)


class WithoutStaleStep(Normalised):
    """Lightning's own epoch for the statistics ends with a step on the gradients of the step before."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        if self.trainer.fit_loop._skip_backward:
            optimizer_closure()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_epoch_for_batch_normalisation_leaves_the_average_as_it_is(stage: int) -> None:
    def train(module: Any, strategy: Any, devices: int, loader: Any) -> Any:
        make_trainer(strategy, [swa()], max_epochs=4, devices=devices).fit(module, loader)
        return module

    def run() -> Any:
        with pytest.warns(UserWarning, match="leaves that step out: the parameters are their average"):
            module = train(Normalised(), sharded(stage), WORLD, PositionedLoader(Data(BATCHES)))
        rank = int(os.environ["RANK"])
        means = [Data(BATCHES).batch(batch, rank)[0].mean(0) for batch in range(BATCHES)]
        torch.testing.assert_close(module.norm.running_mean, torch.stack(means).mean(0))
        return full_parameters(module)

    def in_one_process(module: type[Normalised]) -> Any:
        return bounded(lambda: full_parameters(train(module(), "auto", 1, WholeLoader(BATCHES))))

    (expected,), (stale,) = (run_ranks(in_one_process, of, world_size=1) for of in (WithoutStaleStep, Normalised))
    assert distance(stale, expected) > 1e-3
    for found in run_ranks(run):
        assert distance(found, expected) == 0.0


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_has_the_average(stage: int, tmp_path: Path) -> None:
    """Whoever loads it without the callback gets the average; with the callback, training starts from both."""

    def run() -> Any:
        callback, data, path = EMAWeightAveraging(decay=0.7), Data(BATCHES), tmp_path / "mid"
        callback_of_plain = SaveAfter(BATCHES - 1, tmp_path / "plain")
        trainer = make_trainer(sharded(stage), [callback, SaveAfter(BATCHES - 1, path)])
        trainer.fit(Scheduled(), data.loader())
        average = {name: param.clone() for name, param in callback._average_model.module.named_parameters()}
        found = [Scheduled.load_from_checkpoint(path / "averaged.ckpt"), Scheduled(), Scheduled()]
        make_trainer(sharded(stage)).test(found[1], data.loader(), path, verbose=False)
        make_trainer(sharded(stage), max_epochs=1).fit(found[2], data.loader(), ckpt_path=path)  # no epoch is left
        errors = [distance(full_parameters(module), average) for module in found]

        make_trainer(sharded(stage), [callback_of_plain], max_epochs=1).fit(plain := Scheduled(), data.loader())
        late = EMAWeightAveraging(decay=0.7)
        make_trainer(sharded(stage), [late], max_epochs=1).fit(Scheduled(), data.loader(), ckpt_path=tmp_path / "plain")
        started = dict(late._average_model.module.named_parameters())
        return [*errors, distance(started, full_parameters(plain))]

    assert run_ranks(run) == [[0.0] * 4] * 2  # to the bit: saved and loaded, and stepped not once


def test_in_half_precision_validation_leaves_the_average_as_it_is() -> None:
    """The module cannot hold it as it is."""

    def run() -> Any:
        results = []
        for validates in (0, 1):
            module, callback, data = Scheduled(), EMAWeightAveraging(decay=0.7), Data(BATCHES)
            options = {"precision": "bf16-mixed", "max_epochs": 3, "limit_val_batches": validates}
            make_trainer(sharded(3), [callback], **options).fit(module, data.loader(), data.loader())
            assert len(module.losses) == 3 * validates
            module.losses.clear()
            results.append(after(callback, module))
        return distance(*results)

    assert run_ranks(run) == [0.0, 0.0]  # to the bit: the same operations, but for a validation


def test_a_module_that_is_sharded_already() -> None:
    def run() -> None:
        module, data = Scheduled(), Data(BATCHES)
        make_trainer(strategy(3), max_epochs=1).fit(module, data.loader())
        for make in (ema, swa):
            with pytest.raises(MisconfigurationException, match=rf"{type(make()).__name__} found .* new module for"):
                make_trainer(strategy(3), [make()], max_epochs=2).fit(module, data.loader())

    run_ranks(run)
