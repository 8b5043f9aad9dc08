"""A program that makes backwards and never steps: what it means is done, or it is an error (``step_on``)."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.accelerate.runs import Run, start
from tests.harness.extended import VALUES
from tests.harness.oracle import NORM, distance, full_parameters
from tests.harness.problem import backward_of, loss_of, oracle
from tests.harness.ranks import run_ranks

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


@pytest.mark.extended(but=VALUES)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_loop_that_relies_on_the_step_in_backward_trains_as_plain_torch(stage: int, every: int) -> None:
    def job() -> Any:
        run = start(stage, accumulate=every)
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


@pytest.mark.parametrize("job", [second_window, end_of_training])
def test_where_it_may_rely_on_it_that_is_an_error(job: Callable[[], None]) -> None:
    """As soon as the second window begins; or, where every backward synchronises, at the end."""
    run_ranks(job)


def test_a_program_that_reads_the_norm_and_skips_a_step_steps_where_it_likes() -> None:
    def job() -> Any:
        run = start(2, accumulate=EVERY)
        for index in range(6):
            loss = loss_of(run.model, run.batch(index))
            run.accelerator.sync_gradients = complete = index % EVERY == EVERY - 1
            run.accelerator.backward(loss)
            if complete:
                run.model.get_global_grad_norm()
                if index != 3:  # skipped once: its gradients are in the next step
                    run.optimizer.step()
                    run.optimizer.zero_grad()
        return run.zerosync.report.step, run.parameters()

    plain = oracle()
    for index in range(6):
        backward_of(plain, index, EVERY)
        if index in (1, 5):
            plain.step()
    for steps, parameters in run_ranks(job):
        assert steps == 2 and distance(parameters, full_parameters(plain.module)) == 0.0


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


ENDS = """
import os
import deepspeed, torch
from zerosync_strategy import attach, prepare_cpu
prepare_cpu()
os.environ["LOCAL_RANK"] = "0"
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
net = torch.nn.Linear(4, 4)
engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters()), config={
    "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}, dist_init_required=False)
zerosync = attach(engine)
for _ in range(2):
    engine.backward(engine(torch.ones(1, 4)).sum())
"""


def test_a_process_that_ends_so_says_that_nothing_was_trained() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and "2 backwards were made of Linear, and no optimizer step" in ended.stderr, ended
