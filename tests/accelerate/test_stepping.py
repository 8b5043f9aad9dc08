"""A program that makes backwards and never steps: what the option ``step_on`` says is done, or it is an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.accelerate.runs import Run, start
from tests.harness import copying
from tests.harness.ending import ending
from tests.harness.oracle import NORM, distance, full_parameters
from tests.harness.problem import backward_of, loss_of, oracle
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach

EVERY = 2


def stock_loop(run: Run, windows: int, every: int = EVERY, reads_norm: bool = True) -> list[float]:
    """A loop for stock Accelerate with DeepSpeed, as LLaMA-Factory's newer trainer has it: it never steps itself."""
    norms = []
    for window in range(windows):
        for micro in range(every):
            loss = loss_of(run.model, run.batch(window * every + micro))
            run.accelerator.sync_gradients = micro == every - 1
            run.accelerator.backward(loss)
        if reads_norm:
            norms.append(float(run.accelerator.deepspeed_engine_wrapped.engine.get_global_grad_norm()))
    return norms


@pytest.mark.extended(but=("2-1",))
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_loop_that_relies_on_the_step_in_backward_trains_as_plain_torch(stage: int, every: int) -> None:
    def job() -> Any:
        run = start(stage, accumulate=every, step_on="backward")
        norms = stock_loop(run, 3, every)
        assert (run.zerosync.report.step, run.zerosync.report.backwards) == (3, every)
        parameters = run.parameters()
        run.accelerator.end_training()
        return parameters, norms

    plain, norms = oracle(), []
    for index in range(3 * every):
        backward_of(plain, index, every)
        if index % every == every - 1:
            norms.append(plain.step(clip=1e6))  # only to know the norm
    for parameters, found in run_ranks(job):
        assert distance(parameters, full_parameters(plain.module)) == 0.0
        assert found == pytest.approx(norms, rel=NORM)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_reading_the_norm_steps_nothing(every: int, clips: bool) -> None:
    """It is the norm of the window; without a step, the next window is an error, and so is the end of training."""

    def job() -> float:
        run = start(2, accumulate=every)
        before = run.parameters()
        (norm,) = stock_loop(run, 1, every)
        if clips:
            assert run.accelerator.clip_grad_norm_(run.model.parameters(), 1.0) == norm
        assert run.zerosync.report is None and distance(run.parameters(), before) == 0.0
        with pytest.raises(RuntimeError, match=r"has not called optimizer.step\(\) after .*step_on to 'backward'"):
            stock_loop(run, 1, every)
        return norm

    plain = oracle()
    for index in range(every):
        backward_of(plain, index, every)
    assert run_ranks(job) == pytest.approx([_norm(plain)] * 2, rel=NORM)


def _norm(plain: Any) -> float:
    return float(torch.cat([gradient.flatten() for gradient in plain.gradients()]).norm())


def second_window() -> None:
    run = start(2, accumulate=EVERY)
    with pytest.raises(RuntimeError, match=r"after the 2 backward\(s\) of the one before.*step_on to 'backward'"):
        stock_loop(run, 2, reads_norm=False)


def end_of_training() -> None:
    run = start(2)
    for index in range(3):
        run.accelerator.backward(loss_of(run.model, run.batch(index)))
    with pytest.raises(RuntimeError, match=r"after 3 backwards and no optimizer step.*step_on to 'backward'"):
        run.accelerator.end_training()


def end_of_training_of_one_window() -> None:
    run = start(2)
    stock_loop(run, 1, 1)
    with pytest.raises(RuntimeError, match=r"after 1 backwards and no optimizer step.*step_on to 'backward'"):
        run.accelerator.end_training()


@pytest.mark.parametrize("job", [second_window, end_of_training, end_of_training_of_one_window])
def test_where_it_may_rely_on_it_that_is_an_error(job: Callable[[], None]) -> None:
    """As soon as the second window begins; or, where every backward synchronises, at the end."""
    run_ranks(job)


def test_the_norm_between_backward_and_step_is_of_the_coming_step() -> None:
    """As under stock Accelerate, which has stepped by then. A step that is skipped drops its gradients."""
    skipped = 3

    def job() -> Any:
        run, norms = start(2, accumulate=EVERY), []
        for index in range(8):
            run.accelerator.sync_gradients = complete = index % EVERY == EVERY - 1
            run.accelerator.backward(loss_of(run.model, run.batch(index)))
            norms.append(run.model.get_global_grad_norm())
            if complete:
                if index != skipped:
                    run.optimizer.step()
                    norms.append(run.model.get_global_grad_norm())
                run.optimizer.zero_grad()
        return run.zerosync.report.step, run.parameters(), [None if norm is None else float(norm) for norm in norms]

    plain, norms, last = oracle(), [], None
    for index in range(8):
        backward_of(plain, index, EVERY)
        if index == skipped:
            norms += [_norm(plain)]
            plain.zero_grad()
        elif index % EVERY == EVERY - 1:
            last = plain.step(clip=1e6)
            norms += [last, last]
        else:
            norms += [last]
    for steps, parameters, found in run_ranks(job):
        assert steps == 3 and distance(parameters, full_parameters(plain.module)) == 0.0
        assert found[0] is None and found[1:] == pytest.approx(norms[1:], rel=NORM)


def adds_up_windows() -> None:
    run = start(2, accumulate=EVERY, step_on="optimizer")
    stock_loop(run, 2, reads_norm=False)
    assert run.zerosync.report is None and run.zerosync.window.backwards == 2 * EVERY


def wants_gradients_alone() -> None:
    run = start(2)
    for index in range(3):
        run.accelerator.backward(loss_of(run.model, run.batch(index)))
        run.zerosync.gradient_norm()
        run.optimizer.zero_grad()
    run.accelerator.end_training()


@pytest.mark.parametrize("job", [adds_up_windows, wants_gradients_alone])
def test_programs_that_do_without_a_step_are_left_alone(job: Callable[[], None]) -> None:
    run_ranks(job)


def test_a_process_that_ends_so_says_that_nothing_was_trained() -> None:
    def job() -> None:
        with ending():
            engine = copying.make_engine(2)
            attach(engine)
            for k in range(2):
                engine.backward(copying.loss_of(engine, k, 0))

    (outcome,) = run_ranks(job, world_size=1, expect="any")
    assert outcome.error is None, str(outcome)
    assert "2 backwards were made of Sequential, and no optimizer step" in outcome.output, str(outcome)
