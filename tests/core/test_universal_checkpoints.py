"""Universal checkpoints: a run goes on with another number of ranks, and with everything that it had."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.engines import make_engine, rank, start
from tests.harness.extended import STAGES
from tests.harness.oracle import distance, full_parameters
from tests.harness.ranks import run_ranks
from tests.harness.universal import STEPS, WORLDS, Net, batch, plain_torch, started, to_universal
from zerosync_strategy import attach, shard_over
from zerosync_strategy.core.failures.errors import CheckpointError


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
def test_other_numbers_of_ranks(stage: int, tmp_path: Path) -> None:
    def train(run: int) -> dict[str, torch.Tensor]:
        net = Net() if run else started(Net())
        zero = {"stage3_param_persistence_threshold": 12, "sub_group_size": 50} if stage == 3 else {}
        engine = make_engine(net, net.optimizer(), stage, zero, checkpoint={"load_universal": run > 0})
        options = {"param_memory_budget": "all" if stage == 3 else 0}
        if WORLDS[run] == 4:  # two nodes, and all in their shards
            of_nodes = {"device": 0, "node": "all"}
            options = {"grad_memory_budget": of_nodes, "node_size": 2}
            options |= {"param_memory_budget": of_nodes} if stage == 3 else {}
        zerosync = attach(engine, **options)
        if run:
            engine.backward(engine(batch(9, 0, rank())))
            engine.step()  # from here on shards are in the order of our stripes
            engine.load_checkpoint(tmp_path, tag=f"universal{run - 1}")
        for step in range(run * STEPS, (run + 1) * STEPS):
            for backward in range(2):
                engine.backward(engine(batch(step, backward, rank())))
            engine.step()
        assert engine.global_steps == (run + 1) * STEPS
        assert WORLDS[run] != 4 or zerosync.report.floor_bytes_between_nodes > 0
        engine.save_checkpoint(tmp_path, tag=f"run{run}")
        return full_parameters(engine.module)

    (oracle,) = run_ranks(plain_torch, world_size=1)
    for run, expected in enumerate(oracle):
        ended = run_ranks(train, run, world_size=WORLDS[run])
        assert max(distance(parameters, expected) for parameters in ended) == 0.0
        to_universal(tmp_path / f"run{run}", tmp_path / f"universal{run}")


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_not_there_is_named(stage: int, tmp_path: Path) -> None:
    def save() -> None:
        engine = make_engine(net := Net(), net.optimizer(), stage)
        attach(engine)
        engine.backward(engine(batch(0, 0, rank())))
        engine.step()
        engine.save_checkpoint(tmp_path, tag="whole")
        engine.save_checkpoint(tmp_path, tag="part", exclude_frozen_parameters=True)

    def load(universal: bool, **options: Any) -> str:
        engine = make_engine(net := Net(), net.optimizer(), stage, checkpoint={"load_universal": universal})
        attach(engine)
        with pytest.raises(CheckpointError) as error:
            engine.load_checkpoint(tmp_path, **options)
        return str(error.value)

    run_ranks(save)
    (text, *_) = run_ranks(load, False, tag="whole", world_size=1)
    assert "Cannot read the checkpoint" in text and "another number of ranks, DeepSpeed's ds_to_universal" in text
    (text, *_) = run_ranks(load, True)
    assert "latest_universal" in text and "ds_to_universal" in text
    to_universal(tmp_path / "part", tmp_path / "universal")
    (text, *_) = run_ranks(load, True)
    assert "the universal checkpoint lacks 'still.bias', 'still.weight' of the module" in text


def test_frozen_parameters_that_would_keep_their_values_are_refused(tmp_path: Path) -> None:
    def load() -> None:
        hpz = {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
        engine = make_engine(net := Net(), net.optimizer(), 3, hpz, checkpoint={"load_universal": True})
        attach(engine)
        with pytest.raises(ValueError, match=r"would leave 'still\.weight' .* Build the engine for it without"):
            engine.load_checkpoint(tmp_path)

    run_ranks(load)


def test_parameters_over_groups_of_ranks_are_refused(tmp_path: Path) -> None:
    def load() -> None:
        start()
        groups = [torch.distributed.new_group([rank]) for rank in range(2)]
        shard_over(groups[rank()], (net := Net()).last)
        engine = make_engine(net, net.optimizer(), 3, checkpoint={"load_universal": True})
        attach(engine)
        with pytest.raises(ValueError, match=r"shard_over\(\) gives to groups of ranks"):
            engine.load_checkpoint(tmp_path)

    run_ranks(load)
