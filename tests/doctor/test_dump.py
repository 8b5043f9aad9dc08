"""`zerosync doctor --dump`: the verdict on a run from the files of its ranks, while it hangs and after it has ended."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.doctor.test_doctor import command
from tests.faults.verdicts import Fault, die, train
from tests.harness.engines import rank, start
from tests.harness.ranks import run_ranks
from zerosync_strategy.core.failures.rank_state import RankState
from zerosync_strategy.core.failures.snapshots import DUMP_DIR, Snapshot, Snapshots, interval
from zerosync_strategy.tools.doctor import dump


def seen_and_killed() -> None:
    time.sleep(2.5)
    die()


def test_a_rank_that_was_killed_is_told_with_where_it_was(tmp_path: Path) -> None:
    fault = Fault("", "", within=seen_and_killed)
    run_ranks(train, 3, fault, expect="any", timeout=90, env={DUMP_DIR: str(tmp_path)})
    found = dump.read(tmp_path).verdict
    assert found is not None and "rank 1 has ended without an error" in found.text
    assert "was last seen, window 3, backward 2, module 'Net', at test_dump.py:" in found.text, found.text


def test_files_of_torch_alone(tmp_path: Path) -> None:
    """As NCCL's watchdog leaves them: one rank has issued a collective, and the other has not."""

    def run() -> bool:
        start()
        dist.all_reduce(torch.ones(4))
        barrier = dist.barrier(async_op=True) if rank() == 0 else None
        time.sleep(0.5)
        trace: Any = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
        if trace is not None:
            (tmp_path / f"nccl_trace_rank_{rank()}").write_bytes(trace())
            while not (tmp_path / f"nccl_trace_rank_{1 - rank()}").exists():
                time.sleep(0.05)
        (barrier or dist.barrier(async_op=True)).wait()
        return trace is not None

    if not all(run_ranks(run)) or not dump.read(tmp_path).recorders:
        pytest.skip("this release of torch records no collectives of gloo")
    found = dump.read(tmp_path).verdict
    assert found is not None and (found.cause, found.ranks) == ("elsewhere", (1,)), found
    assert (
        "rank 1 has issued nothing after all_reduce of [4] (collective 1 of group '0', at test_dump.py:" in found.text
    )
    assert "rank 0 waits for barrier of nothing (collective 2 of group '0', at test_dump.py:" in found.text


def save(directory: Path, state: RankState, stuck_for: float) -> None:
    now = time.time() + 60  # however long the command takes to start, the file is not old
    Snapshot(state, now, now - stuck_for, 2).save(directory)


@pytest.mark.parametrize(("stuck_for", "status"), [(60.0, 1), (1.0, 0)])
def test_the_command_on_a_run_that_goes_on(stuck_for: float, status: int, tmp_path: Path) -> None:
    waits = RankState(
        0, activity="the reduction", waits_for="the reduction of the gradients of 'a'", steps=3, backward=2
    )
    save(tmp_path, waits, stuck_for)
    save(tmp_path, RankState(1, steps=3, line="data.py:7 read"), stuck_for)
    done = command("doctor", "--dump", str(tmp_path), "--json")
    first, *ranks = json.loads(done.stdout)["findings"]
    assert done.returncode == status and len(ranks) == 2
    if status:
        assert first["found"] == (
            "rank 1 is outside of the engine and does not communicate, window 4, at data.py:7 read; rank 0 waits for"
            " the reduction of the gradients of 'a', window 4, backward 2"
        )
    else:
        assert first["level"] == "ok"


def test_a_thousand_ranks_write_a_hundred_files_a_second(tmp_path: Path) -> None:
    assert [interval(ranks) for ranks in (2, 100, 1000)] == [1.0, 1.0, 10.0]
    last = Snapshots(tmp_path, 999, 1000, lambda _: RankState(999, activity="the forward"))
    time.sleep(2.5)
    assert not list(tmp_path.iterdir())  # its turn comes in the tenth second
    last.write()  # what has failed does not wait
    (first,) = Snapshot.load_all(tmp_path)
    assert first.written - first.since > 1  # it was looked at meanwhile
    last.end(finished=True)
    now = time.time() + 300  # a run that goes on writes anew while the command starts, however long that takes
    for number, age in ((0, 0), (1, 30), (2, 60)):
        Snapshot(RankState(number, activity="the forward"), now - age, now - age, 1000).save(tmp_path)
    said = [line.strip() for line in dump.read(tmp_path).lines]
    assert "rank 2: its process has ended; it was in the forward" in said, said
    assert "ranks 0-1: in the forward" in said


def test_a_directory_without_files_is_no_verdict(tmp_path: Path) -> None:
    done = command("doctor", "--dump", str(tmp_path))
    assert done.returncode == 2 and DUMP_DIR in done.stderr
    (tmp_path / "zerosync_rank_0.json").write_text("{}")
    with pytest.raises(ValueError, match="no file of ZeroSync's"):
        dump.read(tmp_path)
