"""Checkpoints of whole parameters: a run goes on with any number of ranks, as in plain torch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.engines import make_engine, rank
from tests.harness.optimizers import Mixed, noted
from tests.harness.oracle import distance, full_parameters
from tests.harness.parts import STEPS, Net, batch, plain_torch, started, train_run
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.comm import owners
from zerosync_strategy.core.failures.errors import CheckpointError

WORLDS = (2, 4, 1)


def mixed(net: Net) -> Mixed:
    return Mixed([
        {"params": [net.first.weight, net.last.weight], "whole": True},
        {"params": [net.last.bias, net.first.bias], "lr": 0.02},
    ])  # fmt: skip


def adafactor(net: Net) -> torch.optim.Optimizer:
    """With states of other shapes than the parameters'."""
    groups = [{"params": net.first.parameters()}, {"params": net.last.parameters(), "lr": 2e-3}]
    return torch.optim.Adafactor(groups, lr=0.05)


OPTIMIZERS = {"mixed": mixed, "adafactor": adafactor, "noted": noted}
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("mixed", 1, {}),
    ("adafactor", 2, {"round_robin_gradients": True}),
    ("mixed", 3, {"sub_group_size": 50}),
    ("noted", 3, {}),
]


@pytest.mark.extended
@pytest.mark.parametrize(("name", "stage", "zero"), CASES)
def test_other_numbers_of_ranks(name: str, stage: int, zero: dict[str, Any], tmp_path: Path) -> None:
    def train(run: int) -> dict[str, torch.Tensor]:
        net = Net() if run else started(Net())
        engine = make_engine(net, OPTIMIZERS[name](net), stage, {"reduce_bucket_size": 60, **zero})
        attach(engine)
        if run:
            engine.backward(engine(batch(9, 0, rank())))
            engine.step()
            engine.load_checkpoint(tmp_path)
        train_run(engine, run)
        assert engine.global_steps == (run + 1) * STEPS
        engine.save_checkpoint(tmp_path)
        return full_parameters(engine.module)

    (oracle,) = run_ranks(plain_torch, OPTIMIZERS[name], WORLDS, world_size=1)
    for run, expected in enumerate(oracle):
        ended = run_ranks(train, run, world_size=WORLDS[run])
        assert max(distance(parameters, expected) for parameters in ended) == 0.0, run


@pytest.mark.parametrize(("name", "stage"), [("adafactor", 2), ("mixed", 3)])
def test_other_owners_in_16_bits(name: str, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with other owners goes on to the bit, and so does one with the same: from fp32 master weights."""

    def built() -> tuple[Any, torch.optim.Optimizer]:
        net = started(Net())
        engine = make_engine(net, OPTIMIZERS[name](net), stage, {"reduce_bucket_size": 60}, bf16={"enabled": True})
        attach(engine)
        return engine, engine.optimizer.optimizer

    def steps(engine: Any, first: int, last: int) -> dict[str, torch.Tensor]:
        for step in range(first, last):
            engine.backward(engine(batch(step, 0, rank()).bfloat16()))
            engine.step()
        return full_parameters(engine.module)

    def run() -> list[int]:
        engine, optimizer = built()
        steps(engine, 0, 3)
        engine.save_checkpoint(tmp_path)
        expected = steps(engine, 3, 6)
        owned = []
        for cost in (owners.step_cost, lambda shape: 1.0 / sum(shape)):
            monkeypatch.setattr(owners, "step_cost", cost)
            other, optimizer = built()
            steps(other, 7, 8)
            other.load_checkpoint(tmp_path)
            found = steps(other, 3, 6)
            assert all(torch.equal(found[key], expected[key]) for key in expected)
            owned.append(sum(param.numel() for group in optimizer.param_groups for param in group["params"]))
        return owned

    assert all(first != second for first, second in run_ranks(run))


@pytest.mark.parametrize("stage", [2, 3])
def test_flat_shards_and_whole_parameters_load_each_other(stage: int, tmp_path: Path) -> None:
    """On as many ranks, too. States that are not by element are of no use to flat shards."""

    def built(whole: bool, make: Any = Net.optimizer) -> Any:
        engine = make_engine(net := started(Net()), make(net), stage)
        attach(engine, elementwise_optimizer="whole" if whole else True)
        return engine

    def steps(engine: Any, first: int, last: int) -> dict[str, torch.Tensor]:
        for step in range(first, last):
            engine.backward(engine(batch(step, 0, rank())))
            engine.step()
        return full_parameters(engine.module)

    def run() -> None:
        for whole in (True, False):
            steps(engine := built(whole), 0, 3)
            engine.save_checkpoint(tmp_path, tag=str(whole))
            expected = steps(engine, 3, 5)
            steps(other := built(not whole), 7, 8)
            other.load_checkpoint(tmp_path, tag=str(whole))
            assert distance(steps(other, 3, 5), expected) == 0.0
        steps(engine := built(True, adafactor), 0, 1)
        engine.save_checkpoint(tmp_path, tag="rows")
        other, before = built(False), full_parameters(engine.module)
        with pytest.raises(CheckpointError, match=r"has the shape .*, and AdamW steps flat shards.*Nothing was loaded"):
            other.load_checkpoint(tmp_path, tag="rows")
        other.load_checkpoint(tmp_path, tag="rows", load_optimizer_states=False)
        assert distance(full_parameters(other.module), before) == 0.0

    run_ranks(run)
