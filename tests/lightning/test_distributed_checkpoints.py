"""Under Lightning: a run goes on with another stage and number of ranks, and the last complete save is kept."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from tests.harness.oracle import distance, full_parameters
from tests.harness.parts import STEPS, Net, batch, plain_torch, started
from tests.harness.ranks import run_ranks
from tests.lightning.runs import Recorder, make_trainer
from tests.lightning.test_other_ranks import Module, TwoOptimizers
from zerosync_strategy import CheckpointError, ZeroSyncStrategy
from zerosync_strategy.core.checkpoints import dcp

RUNS = ((2, 2), (3, 3), (1, 1), (3, 2))
"""Stage and ranks of each run, of one epoch; the next goes on where it has ended."""


def strategy(stage: int, **options: Any) -> ZeroSyncStrategy:
    return ZeroSyncStrategy(stage=stage, checkpoint_format="distributed", **options)


class Evaluated(Module):
    def test_step(self, _: Any, batch_idx: int) -> None:
        self.log("loss", self.net(batch(7, batch_idx, 0)))


class TwoEvaluated(TwoOptimizers, Evaluated):
    pass


@pytest.mark.extended(but=("TwoEvaluated-False",))
@pytest.mark.parametrize(
    ("make", "elementwise"),
    [(Evaluated, False), (TwoEvaluated, False), pytest.param(TwoEvaluated, "whole", marks=pytest.mark.extended)],
)
def test_other_stages_and_numbers_of_ranks(make: type[Module], elementwise: bool | str, tmp_path: Path) -> None:
    """The background's saves, too; and any ranks evaluate."""

    def train(run: int) -> tuple[dict[str, torch.Tensor], float]:
        stage, ranks = RUNS[run]
        options = {"checkpoint_background": run % 2 == 0, "elementwise_optimizer": elementwise}
        single = make is Evaluated
        trainer = make_trainer(
            strategy(stage, **options), [recorder := Recorder()], devices=ranks, max_epochs=run + 1,
            accumulate_grad_batches=2 if single else 1,
        )  # fmt: skip
        module = make(Net() if run else started(Net()))
        trainer.fit(module, DataLoader(range(2 * STEPS)), ckpt_path=tmp_path / f"run{run - 1}" if run else None)
        assert trainer.global_step == (run + 1) * STEPS * (1 if single else 2)
        trainer.save_checkpoint(tmp_path / f"run{run}")
        tester = make_trainer(strategy(5 - stage if stage > 1 else 1), devices=ranks)
        tester.test(evaluated := make(Net()), DataLoader(range(2)), tmp_path / f"run{run}", verbose=False)
        with torch.no_grad():
            for name, value in full_parameters(evaluated.net).items():
                assert torch.equal(value, recorder.parameters[name]), name
        return recorder.parameters, float(tester.callback_metrics["loss"])

    (oracle,) = run_ranks(plain_torch, Net.optimizer, [ranks for _, ranks in RUNS], world_size=1)
    for run, expected in enumerate(oracle):
        ended = run_ranks(train, run, world_size=RUNS[run][1])
        assert max(distance(parameters, expected) for parameters, _ in ended) == 0.0
        net = Net()
        with torch.no_grad():
            net.load_state_dict({"scale": torch.full((1,), 3.0), **expected}, strict=False)
            losses = [float(net(batch(7, index, 0))) for index in range(2)]
        assert [loss for _, loss in ended] == pytest.approx([sum(losses) / 2] * len(ended), rel=1e-4)


def test_the_last_complete_checkpoint_is_kept(tmp_path: Path) -> None:
    """By ``ModelCheckpoint(save_top_k=1)``, which removes the one before as soon as a save returns."""

    class Sees(Callback):
        """Which checkpoints are complete after each batch; none is while a rank writes."""

        def __init__(self) -> None:
            self.complete: list[list[str]] = []

        def on_train_batch_end(self, *_: Any) -> None:
            self.complete.append(sorted(path.parts[-3] for path in tmp_path.glob("*/checkpoint/.metadata")))

    def run(fails: bool) -> list[list[str]]:
        saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=1)
        write, calls = dcp.write, [0]

        def slowly(folder: Path, *arguments: Any) -> Any:
            calls[0] += 1
            time.sleep(0.3)
            if fails and calls[0] == 3 and os.environ["RANK"] == "1":
                raise OSError(28, "No space left on device")
            return write(folder, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dcp, "write", slowly)
            trainer = make_trainer(
                strategy(2, checkpoint_background=True), [saves, sees := Sees()], enable_checkpointing=True
            )
            if fails:
                with pytest.raises(CheckpointError, match="rank 1: OSError"):
                    trainer.fit(Module(Net()), DataLoader(range(40)))
            else:
                trainer.fit(Module(Net()), DataLoader(range(4)))
        return sees.complete

    for seen in run_ranks(run, False):
        assert seen[0] == [] and all(1 <= len(complete) <= 2 for complete in seen[2:]), seen
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["step=4.ckpt"]
    (tmp_path / "step=4.ckpt").rename(tmp_path / "before")
    run_ranks(run, True)
    assert (tmp_path / "step=2.ckpt" / "checkpoint" / ".metadata").exists()
