"""W4: long before the timeout, who waits in vain is told why, and nobody is while a rank is busy."""

import contextlib
import ctypes
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness.engines import make_engine, rank, start
from tests.harness.ranks import run_ranks
from tests.harness.told import LOOK, Told, end_soon, look_often, told_by
from zerosync_strategy import attach
from zerosync_strategy.core.comm.collectives import InFlight
from zerosync_strategy.core.comm.journal import issue
from zerosync_strategy.core.failures.rank_status import HangWatch, rank_status
from zerosync_strategy.core.failures.words import Report

MINUTES = timedelta(minutes=4)  # the timeout, of which none of these waits sees the half
pytestmark = pytest.mark.off_device("gloo's waits block the host")


def begin(folder: Path, then: Callable[[], Any] = lambda: None) -> Told:
    start(MINUTES)
    told = look_often(folder, then)
    rank_status()
    return told


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


def test_a_rank_that_raised(tmp_path: Path) -> None:
    """Its program has caught the error, and does not go on."""

    def run() -> str:
        told = begin(tmp_path)
        if rank() == 2:
            with contextlib.suppress(ValueError), rank_status().activity("the forward"):
                raise ValueError("no such token")
            wait_for(told_by(0, tmp_path)), wait_for(told_by(1, tmp_path))
        dist.barrier()
        return told.getvalue()

    first, second, _ = run_ranks(run, world_size=3, timeout=90)
    for told in (first, second):
        assert "Verdict: rank 2 raised ValueError in the forward, at test_early_verdicts.py" in told, told
        assert "test_early_verdicts.py" in told and "wait for torch.distributed.barrier()" in told, told
        assert told.count("Verdict") == 1 and "Either a rank has ended" in told, told


@pytest.mark.extended(but=("left",))
@pytest.mark.parametrize("how", ["killed", "left"])
def test_a_rank_whose_process_has_ended(tmp_path: Path, how: str) -> None:
    """As on NCCL, where no connection tells of it: the waiting ranks have none to it."""

    def run() -> str:
        told = begin(tmp_path)
        group = dist.new_group([0, 1])
        dist.barrier()
        if rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else rank_status().leave()
        if rank() == 1:
            wait_for(told_by(0, tmp_path))
        if rank() < 2:
            dist.barrier(group)
        else:
            wait_for(told_by(0, tmp_path))
        return told.getvalue()

    outcomes = run_ranks(run, world_size=3, timeout=90, expect="any")
    assert "Verdict: rank 2 has ended without an error; rank 0 waits for" in outcomes[0].value, str(outcomes[0])
    assert "rank 2: gave no answer: its process has ended" in outcomes[0].value


class Slow:
    """A work that takes seconds."""

    def wait(self, timeout: timedelta) -> None:
        time.sleep(timeout.total_seconds())


def exchange(tag: int, seconds: float) -> InFlight:
    peer = 1 - rank()
    message = peer, [torch.ones(1)], [torch.ones(1)]
    of_tag = issue(None, tag, [message])
    return InFlight([Slow()], lambda: None, timeout=timedelta(seconds=seconds), label=f"it {tag}", exchange=of_tag)


def barriers() -> None:
    other = dist.new_group([0, 1])
    dist.barrier(other if rank() else None)


def messages() -> None:
    exchange(7 + rank(), 60).wait()


def messages_and_barrier() -> None:
    dist.barrier() if rank() else exchange(7, 60).wait()


class Layers(nn.Module):
    """Two layers, of which rank 1 leaves out the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        return self.second(self.first(x) if whole else x)


def gathers() -> None:
    layers = Layers()
    nothing_ahead = dict.fromkeys(
        ("stage3_param_persistence_threshold", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size"), 0
    )
    engine = make_engine(layers, torch.optim.SGD(layers.parameters(), lr=0.1), 3, nothing_ahead)
    attach(engine)
    engine(torch.ones(2, 8), rank() == 0)


@pytest.mark.extended(but=("messages",))
@pytest.mark.parametrize(
    ("act", "verdict"),
    [
        (barriers, "rank 1 has issued barrier of nothing (collective 1 of group '1'"),
        (messages, "rank 0 waits for it 7"),
        (messages_and_barrier, "rank 1 waits for torch.distributed.barrier()"),
        (gathers, "rank 0 waits for the gather of 'first.weight', 'first.bias'"),
    ],
    ids=["barriers", "messages", "messages and barrier", "gathers"],
)
def test_ranks_that_wait_for_each_other(tmp_path: Path, act: Callable[[], None], verdict: str) -> None:
    """Each rank prints the verdict, with line and remedy, and ends."""

    def run() -> None:
        begin(tmp_path, end_soon)
        act()

    run_ranks(run, timeout=90, expect="any")
    for number in range(2):
        told = told_by(number, tmp_path).read_text()
        assert "Either a rank has ended" in told and verdict in told and "test_early_verdicts.py:" in told, told


def sleep() -> None:
    time.sleep(8 * LOOK)


def compute() -> None:
    ends = time.monotonic() + 8 * LOOK
    while time.monotonic() < ends:
        torch.ones(100, 100) @ torch.ones(100, 100)


def hold() -> None:
    """As a large file that is unpickled, longer than an inquiry waits for answers."""
    ctypes.PyDLL(None).sleep(7)


@pytest.mark.extended(but=("sleep", "hold"))
@pytest.mark.parametrize("busy", [sleep, compute, hold])
def test_nothing_is_said_while_a_rank_is_busy(tmp_path: Path, busy: Callable[[], None]) -> None:
    def run() -> str:
        told = begin(tmp_path)
        if rank() == 1:
            busy()
        dist.barrier()
        return told.getvalue()

    assert run_ranks(run, timeout=90) == ["", ""]


@pytest.mark.parametrize("ahead", [0, 1])
def test_nothing_is_said_while_all_are_in_one_collective(tmp_path: Path, ahead: int) -> None:
    """A large message on a slow network, which a rank may have received before the others."""

    def run() -> str:
        told = begin(tmp_path)
        exchange(7, 8 * LOOK if rank() else 0).wait()
        exchange(7 if rank() == ahead else 8, 0 if rank() else 8 * LOOK).wait()
        return told.getvalue()

    assert run_ranks(run, timeout=90) == ["", ""]


@pytest.mark.parametrize("goes_on", ["moves", "waits for nothing", "waits for something else", "ends"])
def test_who_goes_on_is_told_nothing(goes_on: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It does so while it asks, each time: what is found is of ranks that may since have ended, as it does itself."""
    moves, waits_for, asked = [7], ["a barrier"], threading.Event()

    def ask() -> Report:
        asked.set()
        if goes_on == "moves":
            moves[0] += 1
        elif goes_on == "ends":
            watch._ended.wait(10)
        else:
            waits_for[0] = "" if goes_on == "waits for nothing" else f"another {waits_for[0]}"
        return Report("rank 1 has ended without an error", [], certain=True)

    watch = HangWatch(0.06, lambda: moves[0], lambda: waits_for[0], ask)
    assert asked.wait(10)
    time.sleep(0.2 if goes_on != "ends" else 0)
    watch.end()
    assert not watch._thread.is_alive() and capsys.readouterr().err == ""


def test_who_waits_for_one_thing_after_another_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """A program's own collectives, one at each look: after the first, nobody is asked, and nobody is told."""
    numbers, asked = itertools.count(), []
    watch = HangWatch(0.06, lambda: 7, lambda: f"all_reduce {next(numbers)}", lambda: asked.append(1) or Report("", []))
    while next(numbers) < 40:
        time.sleep(0.01)
    watch.end()
    assert len(asked) <= 1 and capsys.readouterr().err == ""
