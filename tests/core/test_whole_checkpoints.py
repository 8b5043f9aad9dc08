"""Checkpoints of whole parameters: a run goes on with any number of ranks, as in plain torch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.engines import make_engine, rank
from tests.harness.optimizers import Mixed, noted
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from tests.harness.universal import STEPS, Net, batch, plain_torch, started, to_universal
from zerosync_strategy import attach

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
        for step in range(run * STEPS, (run + 1) * STEPS):
            for backward in range(2):
                engine.backward(engine(batch(step, backward, rank())))
            engine.step()
        assert engine.global_steps == (run + 1) * STEPS
        engine.save_checkpoint(tmp_path)
        return full_parameters(engine.module)

    (oracle,) = run_ranks(plain_torch, OPTIMIZERS[name], WORLDS, world_size=1)
    for run, expected in enumerate(oracle):
        ended = run_ranks(train, run, world_size=WORLDS[run])
        assert max(distance(parameters, expected) for parameters in ended) == 0.0, run
    with pytest.raises((KeyError, TypeError)):  # states by name are none by element
        to_universal(tmp_path / f"global_step{len(WORLDS) * STEPS}", tmp_path / "universal")


@pytest.mark.parametrize(("name", "stage"), [("adafactor", 2), ("mixed", 3)])
def test_states_of_plain_torch(name: str, stage: int) -> None:
    """A run of plain torch goes on under ZeroSync, and its optimizer's state is that of plain torch."""

    def run() -> None:
        plain, net = Net(), Net()
        oracle = Oracle(plain, OPTIMIZERS[name](plain))
        losses = [lambda r, k=k: plain(batch(k, 0, r)) for k in range(4)]
        for loss in losses[:2]:
            oracle.backward(loss)
            oracle.step()
        net.load_state_dict(plain.state_dict())
        engine = make_engine(net, OPTIMIZERS[name](net), stage)
        zerosync = attach(engine)
        zerosync.load_full_optimizer_state(oracle.optimizer.state_dict())
        for k, loss in enumerate(losses[2:], 2):
            engine.backward(engine(batch(k, 0, rank())))
            oracle.backward(loss)
            engine.step()
            oracle.step()
        assert distance(full_parameters(net), full_parameters(plain)) == 0.0
        found, expected = zerosync.full_optimizer_state(), oracle.optimizer.state_dict()
        if rank():
            assert found == {}
        else:
            assert found["param_groups"] == expected["param_groups"]
            assert found["state"].keys() == expected["state"].keys()
            params = [param for group in oracle.optimizer.param_groups for param in group["params"]]
            for number, state in found["state"].items():
                of_oracle = {key: oracle.state_of(params[number], key) for key in expected["state"][number]}
                assert distance(state, of_oracle) == 0.0
            OPTIMIZERS[name](Net()).load_state_dict(found)
        with pytest.raises(ValueError, match=r"groups have \[4\] parameters"):
            zerosync.load_full_optimizer_state(torch.optim.SGD(list(net.parameters())[:4]).state_dict())
        other = attach(make_engine(net := Net(), net.optimizer(), stage))
        with pytest.raises(ValueError, match=r"found AdamW, whose states are ZeRO's flat shards"):
            other.full_optimizer_state()

    run_ranks(run)


@pytest.mark.parametrize(("name", "stage"), [("adafactor", 2), ("mixed", 3)])
def test_other_owners_in_16_bits(name: str, stage: int, tmp_path: Path) -> None:
    """A run with other owners goes on to the bit, and so does one with the same: from fp32 master weights."""

    def built(cost: Any = None) -> tuple[Any, torch.optim.Optimizer]:
        net = started(Net())
        engine = make_engine(net, OPTIMIZERS[name](net), stage, {"reduce_bucket_size": 60}, bf16={"enabled": True})
        attach(engine, step_cost=cost)
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
        for cost in (None, lambda shape, _: 1.0 / sum(shape)):
            other, optimizer = built(cost)
            steps(other, 7, 8)
            other.load_checkpoint(tmp_path)
            found = steps(other, 3, 6)
            assert all(torch.equal(found[key], expected[key]) for key in expected)
            owned.append(sum(param.numel() for group in optimizer.param_groups for param in group["params"]))
        return owned

    assert all(first != second for first, second in run_ranks(run))
