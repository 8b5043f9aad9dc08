"""Saves over a checkpoint of the same name, as by `save_last=True`, that are interrupted: refused, not mixed (K1)."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.harness.checkpoints import die_in_file
from tests.harness.problem import adamw
from tests.harness.ranks import run_ranks
from tests.lightning.runs import Data, Module, SaveAfter, make_trainer, strategy
from zerosync_strategy import CheckpointError
from zerosync_strategy.core.failures.errors import NOTHING_LOADED


class Two(Module):
    """Two optimizers, and so two engines, each with a directory in the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [adamw(self.net[:2].parameters()), adamw(self.net[2:].parameters())]


class Dies(Callback):
    """In the save after the batch ``after``."""

    def __init__(self, after: int, name: str) -> None:
        self.after, self.name = after, name

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.after:
            die_in_file(self.name)()


def error_of(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        call(*args, **options)
    return str(error.value)


@pytest.mark.extended
@pytest.mark.parametrize("stage", [2, 3])
def test_the_last_checkpoint(stage: int, tmp_path: Path) -> None:
    def save() -> None:
        every = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1, save_last=True)
        trainer = make_trainer(strategy(stage), [every, Dies(3, "last.ckpt")], enable_checkpointing=True)
        trainer.fit(Module(adamw), Data(4).loader())

    def load() -> None:
        for call in ("fit", "test"):
            trainer = make_trainer(strategy(stage))
            text = error_of(getattr(trainer, call), Module(adamw), Data(4).loader(), ckpt_path=tmp_path / "last.ckpt")
            assert "the save was interrupted: zerosync_rank_" in text and "of step 4 is not complete" in text
            assert f"The newest checkpoint there that is whole: {tmp_path}/step=4.ckpt" in text

    run_ranks(save, expect="any")
    assert (tmp_path / "step=4.ckpt").is_dir() and (tmp_path / "last.ckpt").is_dir()
    run_ranks(load)


def test_several_engines_save_one_checkpoint(tmp_path: Path) -> None:
    """Interrupted between them, neither is loaded; nor are parts of two checkpoints, or one without a shard."""
    again, other, mixed, plain = (tmp_path / name for name in ("again", "other", "mixed", "plain"))

    def save() -> None:
        callbacks = [SaveAfter(0, again), SaveAfter(1, other), Dies(2, "optimizer_1"), SaveAfter(2, again)]
        make_trainer(strategy(2), callbacks).fit(Two(), Data(4).loader())

    def load() -> None:
        for call in ("fit", "test"):
            text = error_of(getattr(make_trainer(strategy(2)), call), Two(), Data(4).loader(), ckpt_path=again)
            assert "the save was interrupted: zerosync_rank_" in text, text
            text = error_of(getattr(make_trainer(strategy(2)), call), Two(), Data(4).loader(), ckpt_path=mixed)
            assert "the parts of the checkpoint are of different saves: " in text, text
        text = error_of(make_trainer(strategy(2)).fit, Two(), Data(4).loader(), ckpt_path=plain)
        assert "_optim_states.pt is missing." in text and NOTHING_LOADED in text, text
        make_trainer(strategy(2)).fit(Two(), Data(4).loader(), ckpt_path=other)

    run_ranks(save, expect="any")
    shutil.copytree(other, plain)  # as stock DeepSpeed writes it, and a file lost
    for file in (*plain.rglob("zerosync_*.json"), *plain.glob("optimizer_1/*/*rank_1*_optim_states.pt")):
        file.unlink()
    shutil.copytree(other, mixed)
    shutil.rmtree(mixed / "optimizer_1")
    run_ranks(lambda: make_trainer(strategy(2), [SaveAfter(0, tmp_path / "first")]).fit(Two(), Data(1).loader()))
    shutil.copytree(tmp_path / "first" / "optimizer_1", mixed / "optimizer_1")
    run_ranks(load)
