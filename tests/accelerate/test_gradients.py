"""Gradients that a script changes between backward and step (N1); clipping by norm is in test_semantics.py."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch

from tests.accelerate.runs import Run, start
from tests.harness.extended import STAGES
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.problem import adamw, backward_of, loss_of, oracle
from tests.harness.ranks import run_ranks


def train(run: Run, change: Callable[[], Any], batches: int = 4) -> None:
    for batch in list(run.loader)[:batches]:
        with run.accelerator.accumulate(run.model):
            run.accelerator.backward(loss_of(run.model, batch))
            if run.accelerator.sync_gradients:
                change()
            run.optimizer.step()
            run.optimizer.zero_grad()


def plain(change: Callable[[Any], Any], batches: int = 4) -> dict[str, torch.Tensor]:
    expected: Oracle = oracle(adamw)
    for batch in range(0, batches, 2):
        for k in (batch, batch + 1):
            backward_of(expected, k, 2)
        for param, average in zip(expected.parameters, expected.gradients(), strict=True):
            param.grad = average
        change(expected.parameters)
        expected.ranks = [[param.grad.clone() for param in expected.parameters] for _ in expected.ranks]
        expected.step()
    return full_parameters(expected.module)


def scale(parameters: Any) -> None:
    for param in parameters:
        param.grad.clamp_(-0.05, 0.02)
        param.grad.mul_(0.5)


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_clip_by_value_and_any_change(stage: int) -> None:
    """The one before the first step, the other before the second."""

    def job() -> Any:
        run = start(stage, accumulate=2, optimizer=adamw)
        steps = count()

        def change() -> None:
            if next(steps) == 0:
                return run.accelerator.clip_grad_value_(run.model.parameters(), 0.03)
            with run.zerosync.full_gradients():
                return scale(run.model.parameters())

        train(run, change)
        return run.parameters()

    steps = count()
    expected = plain(lambda given: scale(given) if next(steps) else torch.nn.utils.clip_grad_value_(given, 0.03))
    for parameters in run_ranks(job):
        assert distance(parameters, expected) == 0.0


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_a_change_of_what_is_local(stage: int) -> None:
    def job() -> None:
        run = start(stage, accumulate=2, overlap_last=False)
        with pytest.raises(RuntimeError, match=r"was changed between backward and step.*full_gradients\(\)"):
            train(run, lambda: scale(run.model.parameters()))
        run.optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"was changed between backward and step"):  # between two backwards
            for index in range(2):
                with run.accelerator.accumulate(run.model):
                    run.accelerator.backward(loss_of(run.model, run.batch(index)))
                    scale(run.model.parameters())
        with pytest.raises(ValueError, match=r"clip_grad_value_\(\) .*where accelerator.sync_gradients is true"):
            run.optimizer.zero_grad()
            with run.accelerator.accumulate(run.model):
                run.accelerator.backward(loss_of(run.model, run.batch(0)))
                run.accelerator.clip_grad_value_(run.model.parameters(), 0.03)

    run_ranks(job)
