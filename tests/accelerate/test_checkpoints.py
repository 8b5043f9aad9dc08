"""`save_state` into a directory that has one already, and is interrupted: refused, not mixed (K1)."""

from pathlib import Path

import pytest

from tests.accelerate.runs import start
from tests.harness.checkpoints import die_in_file
from tests.harness.oracle import distance
from tests.harness.problem import adamw, loss_of
from tests.harness.ranks import run_ranks
from zerosync_strategy import CheckpointError


def test_an_interrupted_save_state_is_refused(tmp_path: Path) -> None:
    """Here in the states of the generators, after the engine's part and the scheduler's."""

    def save() -> None:
        run = start(2, optimizer=adamw)
        run.accelerator.save_state(tmp_path / "before")
        run.accelerator.save_state(tmp_path / "same")
        run.accelerator.backward(loss_of(run.model, run.batch(0)))
        run.optimizer.step()
        die_in_file("random_states")()
        run.accelerator.save_state(tmp_path / "same")

    def load() -> float:
        run = start(2, optimizer=adamw)
        before = run.parameters()
        with pytest.raises(CheckpointError, match=r"was interrupted: zerosync_rank_\d.json of step 1 is not") as error:
            run.accelerator.load_state(tmp_path / "same")
        assert f"The newest checkpoint there that is whole: {tmp_path / 'before'}" in str(error.value)
        kept = distance(run.parameters(), before)
        run.accelerator.load_state(tmp_path / "before")
        return kept

    run_ranks(save, expect="any")
    assert run_ranks(load) == [0.0, 0.0]
