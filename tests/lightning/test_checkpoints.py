"""Checkpoints: resume continues bit for bit, a checkpoint in mid-window says what it leaves out (W5)."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger

from tests.harness.extended import STAGES
from tests.harness.oracle import distance, full_parameters
from tests.harness.problem import adamw, loss_of, oracle
from tests.harness.ranks import run_ranks
from tests.lightning.runs import (
    Data,
    Module,
    PositionedLoader,
    Recorder,
    SaveAfter,
    accumulate,
    fit,
    make_trainer,
    strategy,
)


class Scheduled(Module):
    def __init__(self) -> None:
        super().__init__(adamw)

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
def test_resume_is_bit_identical_to_the_uninterrupted_run(stage: int, tmp_path: Path) -> None:
    def run() -> Any:
        data = Data(10)

        def train(*callbacks: Any, **options: Any) -> tuple[Any, Any]:
            recorder = Recorder()
            trainer = make_trainer(strategy(stage), [recorder, *callbacks], accumulate_grad_batches=4, max_epochs=2)
            trainer.fit(Scheduled(), PositionedLoader(data), **options)
            return recorder, trainer

        save = SaveAfter(7, tmp_path / "mid")
        whole, trainer = train(save)
        assert not [text for text in save.warnings if "backward(s)" in text]
        resumed, second = train(ckpt_path=tmp_path / "mid")
        assert len(resumed.reports) == len(whole.reports) - 2 and len(resumed.steps) == len(whole.steps) - 8
        assert all(lightning == engine for lightning, engine in resumed.steps)
        assert second.global_step == trainer.global_step == 6
        assert second.optimizers[0].param_groups[0]["lr"] == trainer.optimizers[0].param_groups[0]["lr"]
        return distance(resumed.parameters, whole.parameters)

    # To the bit: both make the same operations, from the same bits on the same layout.
    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended(but=("1",))
@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoint_in_mid_window(stage: int, tmp_path: Path) -> None:
    """The run goes on exactly; the checkpoint holds the last step, and says on saving what it leaves out."""

    def run() -> Any:
        save = SaveAfter(5, tmp_path / "mid")
        recorder, _ = fit(Module(), strategy(stage), 8, callbacks=[save], accumulate_grad_batches=4)
        trainer = make_trainer(strategy(stage), [at := AtStart()], accumulate_grad_batches=4)
        trainer.fit(Module(), PositionedLoader(Data(8)), ckpt_path=tmp_path / "mid")
        plain = oracle()
        first_step = accumulate(plain, 4, 4)
        texts = [text for text in save.warnings if "2 backward(s)" in text and "not in the checkpoint" in text]
        whole = accumulate(oracle(), 8, 4)
        make_trainer(strategy(stage)).test(evaluated := Module(), Data(4).loader(), tmp_path / "mid", verbose=False)
        tested = {name.removeprefix("net."): param for name, param in full_parameters(evaluated).items()}
        assert distance(tested, first_step) == 0.0
        return distance(recorder.parameters, whole), distance(at.parameters, first_step), len(texts)

    assert run_ranks(run) == [(0.0, 0.0, 1), (0.0, 0.0, 0)]


class AtStart(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.parameters = {name.removeprefix("net."): p for name, p in full_parameters(pl_module).items()}


class Counts(Module):
    """Has a buffer, on whose value the loss depends."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(width))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.scale.mean()


def test_full_weights_of_one_file(tmp_path: Path) -> None:
    """Stock trains on with the weights that the optimizer was made with, and loads buffers on rank 0 alone."""

    def save() -> Any:
        trainer = make_trainer("auto", devices=1)
        trainer.fit(module := Counts(), Data(4).loader())
        module.scale *= 0.5
        trainer.save_checkpoint(tmp_path / "full.ckpt")
        return full_parameters(module.net)

    (saved,) = run_ranks(save, world_size=1)

    def run() -> Any:
        at, recorder = AtStart(), Recorder()
        trainer = make_trainer(strategy(3, load_full_weights=True), [at, recorder], max_epochs=2)
        trainer.fit(Counts(), Data(4).loader(), ckpt_path=tmp_path / "full.ckpt")
        evaluated, other = Counts(), Counts(width=2)
        make_trainer(strategy(3, load_full_weights=True)).test(
            evaluated, Data(4).loader(), tmp_path / "full.ckpt", verbose=False
        )
        with pytest.raises(RuntimeError, match=r"another module in the checkpoint: 'scale': \(1,\) for \(2,\)"):
            make_trainer(strategy(3, load_full_weights=True)).test(other, Data(4).loader(), tmp_path / "full.ckpt")
        plain = oracle()
        plain.module.load_state_dict(saved)
        data = Data(4)
        for batch in range(4):
            plain.backward(lambda rank, batch=batch: 0.5 * loss_of(plain.module, data.batch(batch, rank)))
            plain.step()
        found = (at.parameters, recorder.parameters, full_parameters(evaluated.net))
        return [distance(a, b) for a, b in zip(found, (saved, full_parameters(plain.module), saved), strict=True)]

    assert run_ranks(run) == [[0.0] * 3] * 2


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_usual_callbacks(stage: int, tmp_path: Path) -> None:
    def run() -> Any:
        checkpoint = ModelCheckpoint(tmp_path / "best", monitor="val_loss", save_top_k=2, save_last=True)
        stop = EarlyStopping("val_loss", patience=1, min_delta=10.0)  # nothing improves by that much: ends early
        _, trainer = fit(
            Scheduled(), strategy(stage), 8, callbacks=[checkpoint, stop, LearningRateMonitor("step")],
            accumulate_grad_batches=4, max_epochs=5, enable_checkpointing=True, log_every_n_steps=1,
            logger=CSVLogger(tmp_path / "logs"),
        )  # fmt: skip
        assert trainer.current_epoch == 2 and trainer.global_step == 4
        return Path(checkpoint.best_model_path).is_dir(), (tmp_path / "best" / "last.ckpt").exists()

    assert run_ranks(run)[0] == (True, True)
    text = next((tmp_path / "logs").rglob("metrics.csv")).read_text()
    assert "lr-AdamW" in text and "0.0034299" in text  # 0.01 * 0.7 ** 3, at the fourth step


@pytest.mark.extended
@pytest.mark.parametrize("stage", STAGES)
def test_validate_test_predict_before_between_and_after(stage: int) -> None:
    class Numbering(Module):
        """Its steps return numbers, before there is an engine to attach to, too."""

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            super().validation_step(batch, batch_idx)
            return batch_idx

    def run() -> float:
        module, data, recorder = Numbering(), Data(4), Recorder()
        trainer = make_trainer(strategy(stage), [recorder])
        (before,) = trainer.validate(module, data.loader())
        trainer.fit(module, data.loader())
        (after,) = trainer.test(module, data.loader())
        predictions = trainer.predict(module, data.loader())
        plain = oracle()
        accumulate(plain, 4, 1)

        def mean_loss(net: Any) -> torch.Tensor:
            return torch.stack([loss_of(net, data.batch(b, r)) for b in range(4) for r in range(2)]).mean()

        torch.testing.assert_close(torch.tensor(before["val_loss"]), mean_loss(oracle().module))
        torch.testing.assert_close(torch.tensor(after["test_loss"]), mean_loss(plain.module))
        expected = [plain.module(data.batch(b, trainer.global_rank)[0]) for b in range(4)]
        torch.testing.assert_close(predictions, expected)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, data.loader())
        return distance(recorder.parameters, accumulate(plain, 4, 1))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.parametrize("stage", STAGES)
def test_validate_and_predict_a_module_without_parameters(stage: int) -> None:
    class Nothing(Module):
        """Say, a metric over what is in the batch, as a baseline of others."""

        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Identity()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("batches", torch.tensor(batch_idx + 1.0), reduce_fx="max", sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0])

    def run() -> float:
        module, data = Nothing(), Data(3)
        trainer = make_trainer(strategy(stage))
        (found,) = trainer.validate(module, data.loader(), verbose=False)
        predictions = trainer.predict(module, data.loader())
        torch.testing.assert_close(predictions, [data.batch(b, trainer.global_rank)[0] for b in range(3)])
        return found["batches"]

    assert run_ranks(run) == [3.0, 3.0]


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_the_engine_is_in_the_mode_of_its_module(stage: int) -> None:
    class Looking(Module):
        def __init__(self) -> None:
            super().__init__()
            self.modes: list[tuple[bool, bool]] = []

        def look(self) -> None:
            self.modes.append((self.trainer.model.training, self.training))

        on_train_start = on_train_epoch_end = on_validation_start = on_test_start = on_predict_start = look

    def run() -> list[tuple[bool, bool]]:
        module, data = Looking(), Data(2)
        trainer = make_trainer(strategy(stage))
        trainer.fit(module, data.loader(), data.loader())
        trainer.validate(module, data.loader(), verbose=False)
        trainer.test(module, data.loader(), verbose=False)
        trainer.predict(module, data.loader())
        assert trainer.model.train() is trainer.model and trainer.model.training and module.training
        return module.modes

    modes = [(mode, mode) for mode in (True, False, True, False, False, False)]
    assert run_ranks(run) == [modes, modes]


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_a_timer_whose_time_was_up_stops_the_resumed_run(stage: int, tmp_path: Path) -> None:
    class TimePasses(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.callbacks[-1]._offset = 3600.0

    def run() -> tuple[int, int, type]:
        first = make_trainer(
            strategy(stage), [TimePasses(), SaveAfter(0, tmp_path / "stopped"), Timer(timedelta(hours=1))]
        )
        first.fit(Module(), Data(4).loader())
        resumed = make_trainer(strategy(stage), [Timer(timedelta(hours=1))])
        resumed.fit(Module(), Data(4).loader(), ckpt_path=tmp_path / "stopped")
        return first.global_step, resumed.global_step, type(resumed.callbacks[-1])

    assert run_ranks(run) == [(1, 1, Timer), (1, 1, Timer)]
