"""DeepSpeed's own checkpoints: a run goes on with another number of ranks and stage, and with everything it had."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.engines import make_engine, rank, start
from tests.harness.oracle import distance, full_parameters
from tests.harness.parts import STEPS, WORLDS, Net, batch, plain_torch, started, train_run
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach, shard_over
from zerosync_strategy.core.failures.errors import CheckpointError

STAGES = {"3": (3, 3, 3, 3, 3), "2": (2, 1, 2, 1, 2), "mixed": (2, 3, 1, 3, 2)}  # of each run


@pytest.mark.extended
@pytest.mark.parametrize("stages", STAGES)
def test_other_numbers_of_ranks(stages: str, tmp_path: Path) -> None:
    def train(run: int, stage: int) -> dict[str, torch.Tensor]:
        net = Net() if run else started(Net())
        zero = {"stage3_param_persistence_threshold": 12, "sub_group_size": 50} if stage == 3 else {}
        engine = make_engine(net, net.optimizer(), stage, zero)
        options = {"param_memory_budget": "all" if stage == 3 else 0}
        if WORLDS[run] == 4:  # two nodes, and all in their shards
            of_nodes = {"device": 0, "node": "all"}
            options = {"grad_memory_budget": of_nodes, "node_size": 2}
            options |= {"param_memory_budget": of_nodes} if stage == 3 else {}
        zerosync = attach(engine, **options)
        if run:
            engine.backward(engine(batch(9, 0, rank())))
            engine.step()  # from here on shards are in the order of our stripes
            _, said = engine.load_checkpoint(tmp_path)
            assert said["said"] == run - 1
        train_run(engine, run)
        assert engine.global_steps == (run + 1) * STEPS
        assert WORLDS[run] != 4 or zerosync.report.floor_bytes_between_nodes > 0
        engine.save_checkpoint(tmp_path, client_state={"said": run})
        return full_parameters(engine.module)

    (oracle,) = run_ranks(plain_torch, world_size=1)
    for run, expected in enumerate(oracle):
        ended = run_ranks(train, run, STAGES[stages][run], world_size=WORLDS[run])
        assert max(distance(parameters, expected) for parameters in ended) == 0.0, run


@pytest.mark.extended(but=("3-2",))
@pytest.mark.parametrize(("saved", "loaded"), [(2, 3), (3, 2)])
def test_parameters_that_another_optimizer_steps(saved: int, loaded: int, tmp_path: Path) -> None:
    """Layers thawed late keep step counts of their own, weights load alone, and what is not there is named."""

    def save() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        engine = make_engine(net := started(Net()), net.optimizer(), saved)
        attach(engine)
        for step in range(3):
            net.first.weight.requires_grad_(step > 0)
            engine.backward(engine(batch(step, 0, 0)))
            engine.step()
        engine.save_checkpoint(tmp_path, tag="whole")
        engine.save_checkpoint(tmp_path, tag="part", save_latest=False, exclude_frozen_parameters=True)
        before = full_parameters(engine.module)
        engine.backward(engine(batch(3, 0, 0)))
        engine.step()
        return before, full_parameters(engine.module)

    def load(**options: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        engine = make_engine(net := Net(), net.optimizer(), loaded)
        attach(engine)
        engine.load_checkpoint(tmp_path, **options)
        before = full_parameters(engine.module)
        engine.backward(engine(batch(3, 0, 0)))
        engine.step()
        return before, full_parameters(engine.module)

    def lacks() -> None:
        engine = make_engine(net := Net(), net.optimizer(), loaded)
        attach(engine)
        before = full_parameters(engine.module)
        with pytest.raises(CheckpointError, match=r"no frozen parameters, such as 'still\.weight'.*Nothing was"):
            engine.load_checkpoint(tmp_path, tag="part")
        assert distance(full_parameters(engine.module), before) == 0.0

    ((weights, goes_on), *_) = run_ranks(save)
    ((there, after), *_) = run_ranks(load, world_size=1)
    assert distance(there, weights) == distance(after, goes_on) == 0.0
    for options in ({"load_optimizer_states": False}, {"load_module_only": True}):
        ((there, after), *_) = run_ranks(lambda options=options: load(**options), world_size=1)
        assert distance(there, weights) == 0.0 < distance(after, goes_on), options
    run_ranks(lacks, world_size=1)
    shards = sorted((tmp_path / "whole").glob("*optim_states.pt"))
    shards[1].unlink()
    for manifest in (tmp_path / "whole").glob("zerosync_rank_*.json"):
        manifest.unlink()
    with pytest.raises(Exception, match=r"file of rank 1 is missing"):
        run_ranks(load, world_size=1)


def test_what_stock_deepspeed_has_saved(tmp_path: Path) -> None:
    def save() -> None:
        engine = make_engine(net := started(Net()), net.optimizer(), 3, bf16={"enabled": True})
        for step in range(2):
            engine.backward(engine(batch(step, 0, rank()).bfloat16()))
            engine.step()
        engine.save_checkpoint(tmp_path)

    def load(stage: int) -> dict[str, torch.Tensor]:
        engine = make_engine(net := Net(), net.optimizer(), stage, bf16={"enabled": True})
        attach(engine)
        engine.load_checkpoint(tmp_path)
        for step in range(2, 4):
            engine.backward(engine(batch(step, 0, 0).bfloat16()))
            engine.step()
        return full_parameters(engine.module)

    run_ranks(save)
    (expected, *_) = run_ranks(load, 3)  # read by DeepSpeed
    for stage in (1, 3):
        (found,) = run_ranks(load, stage, world_size=1)
        assert distance(found, expected) == 0.0


def test_universal_checkpoints_and_groups_of_ranks_are_refused(tmp_path: Path) -> None:
    def universal() -> None:
        engine = make_engine(net := Net(), net.optimizer(), 2, checkpoint={"load_universal": True})
        attach(engine)
        with pytest.raises(ValueError, match=r"leave the option out, and load that one"):
            engine.load_checkpoint(tmp_path)

    def over_groups(text: str = "") -> None:
        start()
        world = torch.distributed.get_world_size()
        net = Net()
        if world > 1:
            groups = [torch.distributed.new_group([rank]) for rank in range(world)]
            shard_over(groups[rank()], net.last)
        engine = make_engine(net, net.optimizer(), 3)
        attach(engine)
        if not text:
            engine.save_checkpoint(tmp_path)
            return
        with pytest.raises(CheckpointError, match=text):
            engine.load_checkpoint(tmp_path)

    run_ranks(universal)
    run_ranks(over_groups)
    remedy = r"Load it on as many ranks and the same ZeRO stage"
    run_ranks(over_groups, rf"had no equal shares of 'last\.weight' and others\. {remedy}", world_size=1)
    run_ranks(over_groups, rf"by 2 ranks, and this run has 3\. {remedy}", world_size=3)
