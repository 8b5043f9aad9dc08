import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import ranks as harness
from tests.harness.ranks import DIED, KILLED, RanksFailed, RanksTimedOut, run_ranks


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every process that a test starts, at any depth, holds the write end of a pipe: its end is read when all ended."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(os.listdir("/proc/self/fd"))
    held, witness = os.pipe()
    os.set_inheritable(witness, True)
    try:
        yield
    finally:
        os.close(witness)
    assert select.select([held], [], [], 5.0)[0], "a process is left"
    os.close(held)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == before


def test_this_process_is_fit_to_be_forked() -> None:
    """After all that warm.py has imported, and tests before this one have done.

    In a worker of pytest-xdist, a thread waits for what to run next. Nobody else has left one, or a pool of them.
    """
    assert len(os.listdir("/proc/self/task")) == 1 + ("PYTEST_XDIST_WORKER" in os.environ)
    assert not dist.is_initialized() and not torch.cuda.is_initialized()


def hang_here() -> None:
    time.sleep(3600)


def sum_of_ranks(offset: int) -> torch.Tensor:
    dist.init_process_group("gloo")
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return value


@pytest.mark.parametrize("world_size", [2, 3])
def test_values_come_back_by_rank(world_size: int) -> None:
    def job(offset: int, *, name: str) -> tuple[int, str, torch.Tensor]:
        total = sum_of_ranks(offset)
        return dist.get_rank(), name, total

    values = run_ranks(job, 10, name="x", world_size=world_size)
    total = torch.tensor([float(sum(range(10, 10 + world_size)))])
    assert values == [(rank, "x", total) for rank in range(world_size)]


def test_a_rank_has_its_own_surroundings(tmp_path: Path) -> None:
    def job() -> tuple[dict[str, str], str, str]:
        Path("left_behind").touch()
        tempfile.mkdtemp()
        return dict(os.environ), os.getcwd(), tempfile.gettempdir()

    here = os.getcwd()
    (env0, cwd0, tmp0), (env1, cwd1, tmp1) = run_ranks(job, env={"ZEROSYNC_EXTRA": "yes"})
    assert len({cwd0, cwd1, tmp0, tmp1, here, str(tmp_path)}) == 6
    assert (env0["RANK"], env1["RANK"]) == (env0["LOCAL_RANK"], env1["LOCAL_RANK"]) == ("0", "1")
    assert env0["WORLD_SIZE"] == env0["LOCAL_WORLD_SIZE"] == "2"
    assert env0["MASTER_PORT"] == env1["MASTER_PORT"]
    assert env0["ZEROSYNC_EXTRA"] == "yes"
    assert "ZEROSYNC_EXTRA" not in os.environ
    assert os.getcwd() == here


def test_a_large_value_comes_back() -> None:
    (value,) = run_ranks(lambda: torch.arange(50 * 2**20 // 8), world_size=1)
    assert torch.equal(value, torch.arange(50 * 2**20 // 8))


def test_rank_0_keeps_the_store_up_for_those_a_step_behind() -> None:
    def job() -> None:
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            time.sleep(0.3)
            dist.distributed_c10d._get_default_store().add("late", 1)  # waits for the answer

    run_ranks(job)


def test_an_exception_ends_the_others_and_is_named_first() -> None:
    def job() -> None:
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 1:
            print("about to fail")
            raise ValueError("no good")
        dist.all_reduce(torch.zeros(1))

    with pytest.raises(RanksFailed, match="rank 1 of 2 failed first: ValueError: no good") as caught:
        run_ranks(job)
    other, first = caught.value.outcomes
    assert (first.error, first.message, first.exitcode) == ("ValueError", "no good", 1)
    assert "in job" in first.traceback
    assert "about to fail" in first.output
    assert other.error is not None
    assert first.traceback.rstrip() in str(caught.value)


def test_a_rank_that_ignores_the_failure_of_another_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "FAILURE_GRACE", 0.2)

    def job() -> None:
        assert os.environ["RANK"] == "1"
        hang_here()

    with pytest.raises(RanksFailed, match="rank 0 of 2 failed first: AssertionError") as caught:
        run_ranks(job)
    assert caught.value.outcomes[1].error == KILLED
    assert "in hang_here" in caught.value.outcomes[1].output


def test_a_hang_is_killed_and_its_stacks_are_shown() -> None:
    with pytest.raises(RanksTimedOut, match="in hang_here") as caught:
        run_ranks(lambda: hang_here() if os.environ["RANK"] == "1" else "done", timeout=0.5)
    assert [outcome.error for outcome in caught.value.outcomes] == [None, KILLED]
    assert "_pytest" not in caught.value.outcomes[1].output


def test_a_rank_that_kills_itself_is_reported_with_the_signal() -> None:
    def job() -> None:
        dist.init_process_group("gloo")
        memory = torch.zeros(50_000_000)  # takes longer to give back than the other rank needs to notice
        dist.barrier()
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(memory[:1])

    with pytest.raises(RanksFailed, match=f"rank 0 of 2 failed first: {DIED}: ended by SIGKILL"):
        run_ranks(job)
    dead, other = run_ranks(job, expect="any")
    assert (dead.error, dead.exitcode, dead.signal) == (DIED, None, signal.SIGKILL)
    assert other.error == "RuntimeError"


def test_leaving_without_a_result_or_with_one_that_cannot_be_pickled_is_a_failure() -> None:
    left, unpicklable = run_ranks(
        lambda: os._exit(0) if os.environ["RANK"] == "0" else (lambda: None), expect="any", timeout=30
    )
    assert (left.error, left.exitcode) == (DIED, 0)
    assert unpicklable.error is not None
    assert unpicklable.exitcode == 1


def test_processes_of_a_rank_end_with_it() -> None:
    def job() -> None:
        subprocess.Popen(["sleep", "3600"], close_fds=False)

    run_ranks(job)


def test_an_interrupt_of_the_parent_ends_the_ranks() -> None:
    def job() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getppid(), signal.SIGINT)
        hang_here()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who started this process may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(job)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_parent_with_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="process group"):
        run_ranks(lambda: None)
