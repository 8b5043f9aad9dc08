"""Averaged gradients in full between the reduction and the step, and what becomes of changes to them (N1)."""

from typing import Any

import pytest
import torch

from tests.harness import engines, groups
from tests.harness.engines import rank
from tests.harness.extended import STAGES
from tests.harness.oracle import NORM, Oracle, distance, full_parameters
from tests.harness.problem import Data, loss_of, network, sgd
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach

BATCHES = 4
NOTHING_STAYS = {"stage3_param_persistence_threshold": 0}


def attached(stage: int) -> Any:
    model = network()
    engine = engines.make_engine(model, sgd(model.parameters()), stage, NOTHING_STAYS if stage == 3 else None)
    return engine, attach(engine), Data(BATCHES)


def plain(factor: float, batches: int = BATCHES) -> dict[str, torch.Tensor]:
    net, data = network(), Data(BATCHES)
    return Oracle(net, sgd(net.parameters())).train(
        lambda net, batch, rank: factor * loss_of(net, data.batch(batch, rank)), batches
    )


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
def test_the_step_uses_what_is_left(stage: int) -> None:
    def run() -> float:
        engine, zerosync, data = attached(stage)
        for batch in range(BATCHES):
            engine.backward(loss_of(engine, data.batch(batch, rank())))
            with zerosync.full_gradients(), zerosync.full_gradients():
                norm = torch.stack([param.grad.norm() for param in engine.module.parameters()]).norm()
                for param in engine.module.parameters():
                    param.grad *= 0.5
                if stage == 3:
                    weight = engine.module[0].weight
                    assert weight.isfinite().all() and weight.shape == (32, 16)  # sharded
                assert float(zerosync.gradient_norm()) == pytest.approx(float(norm) / 2, rel=NORM)
            assert all(param.grad is None for param in engine.module.parameters())
            assert float(zerosync.gradient_norm()) == pytest.approx(float(norm) / 2, rel=NORM)
            engine.step()
        return distance(full_parameters(engine.module), plain(0.5))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
def test_under_a_loss_scale(stage: int) -> None:
    """As under fp16: a backward multiplies by it, and DeepSpeed divides by it in the step."""

    def run() -> Any:
        engine, zerosync, data = attached(stage)
        engine.optimizer.loss_scale = 4.0
        seen = []
        for batch in range(BATCHES):
            engine.backward(loss_of(engine, data.batch(batch, rank())))
            with zerosync.full_gradients():
                seen.append(float(engine.module[0].bias.grad.norm()))
                for param in engine.module.parameters():
                    param.grad *= 0.5
            engine.step()
        net, first = network(), []
        for of_rank in range(2):
            (gradient,) = torch.autograd.grad(loss_of(net, Data(BATCHES).batch(0, of_rank)), [net[0].bias])
            first.append(gradient)
        return distance(full_parameters(engine.module), plain(0.5)), seen[0] / float(torch.stack(first).mean(0).norm())

    for error, ratio in run_ranks(run):
        assert error == 0.0 and abs(ratio - 1) < NORM


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
def test_without_gradients_and_with_some_dropped(stage: int) -> None:
    def run() -> float:
        engine, zerosync, data = attached(stage)
        with zerosync.full_gradients():
            assert all(param.grad is None for param in engine.module.parameters())
        engine.backward(loss_of(engine, data.batch(3, rank())))
        with zerosync.full_gradients():
            engine.optimizer.zero_grad()
            assert all(param.grad is None for param in engine.module.parameters())
            engine.backward(loss_of(engine, data.batch(0, rank())))
        engine.step()
        engine.backward(loss_of(engine, data.batch(1, rank())))
        with pytest.raises(KeyError), zerosync.full_gradients():
            engine.module[0].bias.grad.zero_()
            raise KeyError
        engine.step()  # with the gradients as they were
        return distance(full_parameters(engine.module), plain(1.0, 2))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended
def test_over_groups_of_ranks() -> None:
    """Each rank sees its groups' gradients; clipped by the norm of all groups, the same on every rank."""

    def run() -> float:
        layout = groups.LAYOUTS["grid"]
        reference = groups.Reference(layout, groups.sgd)
        reference.train(2, clip=0.2)
        engine = groups.make_engine(layout, groups.sgd)
        zerosync = attach(engine)
        for k in range(2 * groups.BACKWARDS):
            engine.backward(engine(groups.data(k, rank()), skip=groups.skips(k)) / groups.BACKWARDS)
            if (k + 1) % groups.BACKWARDS == 0:
                with zerosync.full_gradients():
                    zerosync.clip_next_step(0.2)
                engine.step()
        return groups.error_of(engine, reference)

    assert run_ranks(run, world_size=groups.WORLD) == [0.0] * groups.WORLD
