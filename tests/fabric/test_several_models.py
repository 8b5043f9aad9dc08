"""Several models, each with its optimizer: a GAN, and a student that learns from a model without an optimizer."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.fabric.runs import make_fabric
from tests.harness.extended import STAGES
from tests.harness.oracle import Oracle, backward_all, distance, full_parameters
from tests.harness.problem import WORLD, Data, adamw
from tests.harness.ranks import run_ranks


def generator() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16))


def discriminator() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(16, 24), nn.LeakyReLU(), nn.Linear(24, 1))


def judge(discriminator: nn.Module, samples: torch.Tensor, are_real: float) -> torch.Tensor:
    verdict = discriminator(samples)
    return nn.functional.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, are_real))


@pytest.mark.extended(but=("2-True",))
@pytest.mark.parametrize("as_lightnings_example", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_a_gan(stage: int, as_lightnings_example: bool) -> None:
    """Steps in another order than backwards; the discriminator's gradients of the generator's loss are dropped.

    Which model `backward()` is told, if any, makes no difference: gradients reach whom they reach. Nor does it which
    one has `zero_grad()` called, the optimizer or the module.
    """

    def run() -> Any:
        fabric, data = make_fabric(stage), Data(64)
        g, d = generator(), discriminator()
        g, of_g = fabric.setup(g, adamw(g.parameters()))
        d, of_d = fabric.setup(d, adamw(d.parameters()))
        told = {True: (None, None), False: (d, g)}[as_lightnings_example]
        zeroed = {True: (g, d), False: (of_g, of_d)}[as_lightnings_example]
        for step in range(3):
            zeroed[0].zero_grad()
            for batch in (2 * step, 2 * step + 1):
                fabric.backward(judge(d, g(data.batch(batch, fabric.global_rank)[0]), 1.0) / 2, model=told[0])
            zeroed[1].zero_grad()  # they have none of their own yet
            real = data.batch(step, fabric.global_rank)[0]
            loss = judge(d, real, 1.0) + judge(d, g(real).detach(), 0.0)
            fabric.backward(loss, model=told[1])
            of_g.step()
            fabric.clip_gradients(d, of_d, max_norm=0.1)
            of_d.step()

        plain_g, plain_d = generator(), discriminator()
        oracles = [Oracle(plain, adamw(plain.parameters()), WORLD) for plain in (plain_g, plain_d)]
        for step in range(3):
            for batch in (2 * step, 2 * step + 1):
                backward_all(
                    oracles, lambda rank, batch=batch: judge(plain_d, plain_g(data.batch(batch, rank)[0]), 1.0) / 2
                )
            oracles[1].zero_grad()

            def loss_of(rank: int, step: int = step) -> torch.Tensor:
                real = data.batch(step, rank)[0]
                return judge(plain_d, real, 1.0) + judge(plain_d, plain_g(real).detach(), 0.0)

            oracles[1].backward(loss_of)
            oracles[0].step()
            oracles[1].step(clip=0.1)
        steps = [(z.report.reductions, z.report.step) for z in fabric.strategy.zerosyncs]
        pairs = [(g.module, plain_g), (d.module, plain_d)]
        return max(distance(full_parameters(a), full_parameters(b)) for a, b in pairs), steps

    results = run_ranks(run, timeout=60)
    assert max(error for error, _ in results) == 0.0
    assert [steps for _, steps in results] == [[(1, 3), (1, 3)]] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_teacher_without_an_optimizer(stage: int) -> None:
    """Its gradients are refused, for they would be each rank's own; frozen, gradients pass through it."""

    def run() -> Any:
        fabric, data = make_fabric(stage), Data(64)
        student, teacher = generator(), discriminator()
        student, optimizer = fabric.setup(student, adamw(student.parameters()))
        teacher = fabric.setup_module(teacher)
        x = data.batch(0, fabric.global_rank)[0]
        with pytest.raises(RuntimeError, match="set up without an optimizer: their gradients would not be averaged"):
            fabric.backward(teacher(student(x)).sum(), model=student)
        with pytest.raises(RuntimeError, match="found a model that was set up without an optimizer"):
            fabric.backward(teacher(student(x)).sum(), model=teacher)
        teacher.requires_grad_(False)
        optimizer.zero_grad()
        fabric.backward(teacher(student(x)).sum(), model=student)
        optimizer.step()

        plain, frozen = generator(), discriminator()
        oracle = Oracle(plain, adamw(plain.parameters()), WORLD)
        oracle.backward(lambda rank: frozen(plain(data.batch(0, rank)[0])).sum())
        oracle.step()
        return distance(full_parameters(student.module), full_parameters(plain))

    assert run_ranks(run, timeout=60) == [0.0, 0.0]
