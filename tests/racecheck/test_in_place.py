"""`racecheck=K`: the first steps are checked where they run, change nothing, and leave nothing behind."""

import contextlib
import io
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tests.harness import problem
from tests.harness.copying import loss_of, make_engine, oracle
from tests.harness.engines import rank
from tests.harness.oracle import distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.engine import gathering
from zerosync_strategy.core.gradients import local
from zerosync_strategy.racecheck import RaceWarning, simulate

pytestmark = pytest.mark.off_device("it has the one checker of the process")

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


@contextlib.contextmanager
def reports() -> Iterator[list[str]]:
    """What the check says meanwhile: its warnings, and its line on stderr."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(io.StringIO()) as stderr:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", RaceWarning)
        yield said
    said += [str(warning.message) for warning in caught]
    said += [line for line in stderr.getvalue().splitlines() if line.startswith("ZeroSync race check")]


def traces() -> list[Any]:
    """All that a check might leave behind."""
    return [
        *_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack(), get_accelerator(),
        torch.Tensor.record_stream, vars(torch.autograd.Function)["apply"], torch.autograd._engine_run_backward,
        dist.get_backend, dist.all_reduce, dist.distributed_c10d.all_reduce, dist.isend, dist.all_gather_into_tensor,
    ]  # fmt: skip


def streams_of(engine: Any) -> list[Any]:
    if engine.zero_optimization_stage() == 3:
        return [
            gathering.gather_stream(gathering.coordinator(engine.optimizer)),
            engine.optimizer.reduce_and_partition_stream,
        ]
    return [engine.optimizer.reduction_stream]


def step(engine: Any, number: int) -> None:
    for k in (2 * number, 2 * number + 1):
        engine.backward(loss_of(engine, k, rank()) / 2)
    engine.step()


@STAGES
def test_checked_steps_are_the_same_and_leave_no_trace(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_LARGE_BYTES", 0)  # what is used again on a device without streams

    def run(options: dict[str, Any]) -> Any:
        engine = make_engine(stage)
        before = traces()
        with reports() as said:
            with torch.device("cpu"):  # a mode that was there before the check, and goes before it ends
                zerosync = attach(engine, racecheck=2, **options)
            step(engine, 0)
            assert traces() != before and None not in streams_of(engine) and zerosync.findings == []
            with torch.device("cpu"):  # and one that comes before it ends, and stays
                step(engine, 1)
                assert traces()[1:] == before and not any(streams_of(engine))
            step(engine, 2)
        assert traces() == before and zerosync.findings == []
        return said, distance(full_parameters(engine.module), oracle(3, 2))

    options: list[dict[str, Any]] = [{}, {"coalesce": False}, {"grad_memory_budget": 900}]
    for index, results in enumerate(run_ranks(lambda: list(map(run, options)))):
        assert max(error for _, error in results) == 0.0
        for said, _ in results:
            assert len(said) == 1 and said[0].startswith(f"ZeroSync race check, rank {index}: nothing found in "), said
            assert said[0].endswith("operations in 2 optimizer step(s)."), said


@STAGES
def test_what_is_not_ordered_is_found_and_reported_once(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    method = "gathers_wait_for_writes" if stage == 3 else "wait_for_reductions"
    monkeypatch.setattr(Streams, method, lambda self, *args: None)

    def run() -> Any:
        engine = make_engine(stage, {"stage3_param_persistence_threshold": 0})
        with reports() as said:
            zerosync = attach(engine, racecheck=3)
            for number in range(4):
                step(engine, number)
        return said, zerosync.findings

    for said, findings in run_ranks(run):
        assert findings and len(said) == len(set(said)) == len(findings)
        assert all(text.startswith("Race check, rank") and "in 3 optimizer step(s)." in text for text in said), said


def test_a_check_ends_with_what_it_checks() -> None:
    """Whatever ends it: nothing stays, and the report says that it was early and why."""

    def run() -> Any:
        engine = make_engine(2)
        before, ends = traces(), {}

        class Stop(Exception):
            pass

        def fail(*_: Any) -> None:
            raise Stop

        with reports() as ends["detached"]:
            zerosync = attach(engine, racecheck=2)
            step(engine, 0)
            zerosync.detach()
        assert traces() == before
        with reports() as ends["raised"]:
            zerosync = attach(engine, racecheck=2)
            with pytest.warns(UserWarning, match="dropped the gradients"), pytest.raises(Stop):
                loss = loss_of(engine, 0, rank())
                loss.register_hook(fail)
                engine.backward(loss)  # drops the window; the check goes on
            step(engine, 1)
            engine.backward(loss_of(engine, 2, rank()))
            with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
                patch.setattr(engine.optimizer.optimizer, "step", fail)
                engine.step()
            zerosync.abort()
        assert traces() == before
        zerosync.detach()
        with simulate(), pytest.raises(RuntimeError, match="found the race checker at work"):
            attach(engine, racecheck=1)
        assert not hasattr(engine, "_zerosync") and traces() == before
        with reports() as ends["destroyed"]:
            attach(engine, racecheck=1)
            engine.destroy()
        assert traces() == before
        return ends

    for ends in run_ranks(run):
        assert [said[0].partition("step(s).")[2] for said in ends.values()] == [
            " It ended 1 step(s) early: the engine was detached.",
            " It ended 1 step(s) early: step() raised Stop.",
            " It ended 1 step(s) early: the engine was detached.",
        ]
        assert all(len(said) == 1 and "nothing found" in said[0] for said in ends.values()), ends


def test_engines_beside_a_checked_one_take_part() -> None:
    """One attached before and one during the check, with or without the option; it ends with the last that asks."""

    def run() -> Any:
        engines = [make_engine(stage) for stage in (3, 2, 1)]
        before = traces()
        with reports() as said:
            handles = [attach(engine, racecheck=k) for k, engine in zip((0, 1, 2), engines, strict=True)]
            late = make_engine(2)
            handles.append(attach(late))
            for number in range(3):
                assert (traces() == before) == (number == 2)
                for engine in (*engines, late):
                    step(engine, number)
        assert not any(stream for engine in (*engines, late) for stream in streams_of(engine))
        errors = [distance(full_parameters(engine.module), oracle(3, 2)) for engine in (*engines, late)]
        return said, errors, handles[1].findings

    for said, errors, findings in run_ranks(run):
        assert errors == [0.0] * 4 and findings == []
        assert len(said) == 1 and said[0].endswith("operations in 3 optimizer step(s)."), said


def test_under_the_frameworks() -> None:
    """The option reaches the engine as a keyword, and from the block of a DeepSpeed configuration."""
    lightning = pytest.importorskip("tests.lightning.runs")
    accelerate = pytest.importorskip("tests.accelerate.runs")

    def under_lightning() -> Any:
        config = {
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3},
            "zerosync": {"racecheck": 2},
        }
        with reports() as said:
            recorder, trainer = lightning.fit(
                lightning.Module(), lightning.ZeroSyncStrategy(config=config), accumulate_grad_batches=4
            )
        expected = lightning.accumulate(problem.oracle(), 12, 4)
        with reports() as early:
            lightning.fit(lightning.Module(), lightning.ZeroSyncStrategy(stage=2, racecheck=99), batches=1)
        return trainer.strategy.zerosync.findings, said + early, distance(recorder.parameters, expected)

    def under_accelerate() -> Any:
        with reports() as said:
            run = accelerate.start(2, accumulate=4, racecheck=2)
            for batch in run.loader:
                with run.accelerator.accumulate(run.model):
                    run.accelerator.backward(accelerate_loss(run.model, batch))
                    run.optimizer.step()
                    run.optimizer.zero_grad()
        return run.zerosync.findings, said, 0.0

    from tests.harness.problem import loss_of as accelerate_loss

    for job, lines in ((under_lightning, 2), (under_accelerate, 1)):
        for findings, said, error in run_ranks(job):
            assert findings == [] and error == 0.0
            assert len(said) == lines and all("nothing found" in line for line in said), said
            assert "2 optimizer step(s)" in said[0]


def test_a_handle_without_a_check_has_no_findings() -> None:
    def run() -> Any:
        return attach(make_engine(1)).findings

    assert run_ranks(run) == [None, None]
