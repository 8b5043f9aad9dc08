"""The errors of many ranks, without engines: what an inquiry costs, whom it asks, how the answers are put."""

import os
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.rank_status import measure
from tests.harness.ranks import run_ranks
from zerosync_strategy.core.failures import rank_status as module
from zerosync_strategy.core.failures.agreement import require_same
from zerosync_strategy.core.failures.errors import RankError, is_communication_error
from zerosync_strategy.core.failures.flight_recorder import program_line
from zerosync_strategy.core.failures.rank_state import Phase, RankState
from zerosync_strategy.core.failures.rank_status import RankStatus, rank_status
from zerosync_strategy.core.failures.words import lines_of, ranks_text

ERROR = RuntimeError("Timed out")


def a_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def statuses() -> Any:
    store = a_store()
    made = [RankStatus(store.clone(), rank, 3) for rank in range(3)]
    yield made
    for status in made:
        status.end()


# ---- inquiries -------------------------------------------------------------------------------------------------------


@pytest.mark.extended(but=("all",))
@pytest.mark.parametrize("asking", [{3}, set(range(24))], ids=["one", "all"])
def test_an_inquiry_takes_as_many_operations_as_ranks(asking: set[int]) -> None:
    world_size = 24
    _, operations, texts = measure(world_size, asking)
    assert len(texts) == len(asking)
    for text in texts:
        assert "outside of the engine" in text and "gave no answer" not in text
        assert len(text) < 4000
    # A rank that asks says where it has failed, beside its answer. If ranks ask so late that another inquiry is open by
    # then, each costs four operations per rank.
    assert operations["append"] <= 2 * world_size + len(asking) - 1, operations
    assert operations.total() <= 14 * world_size + 20, operations


def test_an_inquiry_has_no_answers_of_the_one_before(
    statuses: list[RankStatus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zerosync_strategy.core.failures.inquiry._SETTLE_SECONDS", 0.02)
    for k in range(40):
        with statuses[1].activity(f"turn {k}"):
            assert f"rank 1: in turn {k} for" in statuses[2 * (k % 2)].describe("the test", ERROR)
    # ... nor if two ask, and one of them again as soon as it has read the summary.
    with ThreadPoolExecutor(2) as pool:
        for k in range(20):
            with statuses[1].activity(f"another turn {k}"):
                for text in pool.map(lambda status: status.describe("the test", ERROR), statuses[::2]):
                    assert f"rank 1: in another turn {k} for" in text


def test_a_collector_that_dies_is_replaced(statuses: list[RankStatus], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerosync_strategy.core.failures.inquiry._SUMMARY_SECONDS", 0.5)
    inquiries = statuses[0]._inquiries
    assert inquiries is not None
    inquiries._store.add("asked/0/0", 1)  # by one that has died before it called anyone
    began = time.monotonic()
    assert "rank 2: outside of the engine" in statuses[0].describe("the test", ERROR)
    assert "rank 2: outside of the engine" in statuses[1].describe("the test", ERROR)
    assert time.monotonic() - began < 4


def test_ranks_that_have_stopped_are_waited_for_a_second_and_others_five() -> None:
    store = a_store()
    here = RankStatus(store.clone(), 0, 3)
    gone = RankStatus(store.clone(), 1, 3)
    gone.record_failure("ValueError in the forward")
    gone.end()
    began = time.monotonic()
    text = here.describe("the test", ERROR)
    assert "rank 1: has stopped: ValueError in the forward" in text
    assert "rank 2: gave no answer: its process has ended" in text
    assert 4.5 < time.monotonic() - began < 9
    third = RankStatus(store.clone(), 2, 3)
    began = time.monotonic()
    assert "rank 2: outside of the engine" in here.describe("the test", ERROR)
    assert time.monotonic() - began < 4
    here.end()
    third.end()


def test_what_a_rank_records_right_after_its_answer_counts(statuses: list[RankStatus]) -> None:
    """A collective of the program's own has failed on it, and it is about to say so."""
    late = RankState(1, Phase.STOPPED, failure="RuntimeError", waits_for="torch.distributed.barrier()", line="t.py:1 f")
    timer = threading.Timer(0.2, lambda: statuses[1]._stop(late))
    timer.start()
    assert "rank 1: has stopped: RuntimeError, at t.py:1 f" in statuses[0].describe("the test", ERROR)
    timer.join()


def test_a_new_process_group_ends_the_thread_of_the_old() -> None:
    def run() -> list[int]:
        store, counts = a_store(), []  # of this rank alone, which outlives its groups
        for _ in range(3):
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            status = rank_status()
            assert status is rank_status()
            assert "rank 0: outside of the engine" in status.describe("the test", ERROR)
            counts.append(sum(thread.name == "zerosync-rank-status" for thread in threading.enumerate()))
            counts.append(len(os.listdir("/proc/self/fd")))
            del status
            dist.destroy_process_group()
        return counts

    (counts,) = run_ranks(run, world_size=1)
    assert counts[0::2] == [1, 1, 1]
    assert counts[3] == counts[5], counts


def test_a_rank_goes_through_the_phases_of_the_table(
    statuses: list[RankStatus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zerosync_strategy.core.failures.inquiry._SETTLE_SECONDS", 0.02)
    one, other = statuses[:2]

    def told() -> str:
        """What the other ranks are told of the first."""
        (line,) = (line for line in other.describe("the test", ERROR).splitlines() if line.startswith("  rank 0:"))
        return line

    with one.activity("the forward"):
        assert told().startswith("  rank 0: in the forward for 0 s, before")  # running
        one.describe("the forward", ERROR)
        with one.activity("the backward"):
            assert "in the backward" in told()  # not lost any more
    for error, words in [
        (dist.DistBackendError("x"), "has stopped: lost the other ranks in the reduction, before"),
        (ValueError("x"), "has stopped: ValueError in the reduction, before"),
    ]:
        with pytest.raises((RankError, ValueError)), one.activity("the reduction"):
            raise error
        assert words in told()
        one.record_failure("KeyError outside of the engine", KeyError())
        assert words in told()  # the first says most
        with one.activity("the next forward"):
            assert "in the next forward" in told()


# ---- lines -----------------------------------------------------------------------------------------------------------


def a_state(rank: int, **parts: Any) -> RankState:
    return RankState(**{
        "rank": rank, "activity": "the reduction", "seconds": 4 + rank % 2,
        "position": "4 optimizer step(s) done, 1 backward(s) since", "line": "train.py:24 main",
        "pid": 1000 + rank, "host": "node", **parts,
    })  # fmt: skip


def no_answer(rank: int) -> RankState:
    return RankState(rank, Phase.GONE)


def test_few_ranks_have_a_line_each() -> None:
    lines = lines_of([no_answer(1), a_state(0)])
    assert lines == [
        "  rank 0: in the reduction for 4 s, 4 optimizer step(s) done, 1 backward(s) since, at train.py:24 main"
        " (pid 1000)",
        "  rank 1: gave no answer: its process has ended, or cannot be reached",
    ]


def test_of_many_ranks_those_that_differ_come_first() -> None:
    states = {rank: a_state(rank) for rank in range(1024)}
    states[18] = a_state(18, activity="", seconds=-1, line="train.py:71 evaluate")
    states[700] = no_answer(700)
    assert lines_of(states.values()) == [
        "  rank 18: outside of the engine, 4 optimizer step(s) done, 1 backward(s) since, at train.py:71 evaluate"
        " (pid 1018 on node)",
        "  rank 700: gave no answer: its process has ended, or cannot be reached",
        "  ranks 0-17, 19-699, 701-1023: in the reduction for 4 to 5 s, 4 optimizer step(s) done, 1 backward(s) since,"
        " at train.py:24 main",
    ]


def test_counts_keep_ranks_apart_only_if_the_lines_suffice() -> None:
    def lines(kinds: int) -> list[str]:
        return lines_of(a_state(k, position=f"{k % kinds} backward(s) since") for k in range(1024))

    assert len(lines(4)) == 4
    assert lines(100) == [
        "  ranks 0-1023: in the reduction for 4 to 5 s, 0 to 99 backward(s) since, at train.py:24 main"
    ]
    gathers = lines_of(a_state(k, activity=f"the gather of 'w' over the ranks [{k // 8 * 8}]") for k in range(1024))
    assert len(gathers) == 1 and "over the ranks [0 to 1016] for" in gathers[0]


def test_the_text_is_bounded() -> None:
    texts = ["".join(chr(97 + int(digit)) for digit in f"{k:04}") for k in range(1024)]
    lines = lines_of(a_state(k, activity=texts[k] + "x\ny" * 1000) for k in range(1024))
    assert len(lines) == 20 and sum(map(len, lines)) < 20 * 500
    assert lines[-2].endswith(": 1005 other answers")


def test_ranges() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 1, 2, 4]) == "ranks 0-2, 4"
    assert ranks_text(range(0, 1024, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 504 more"


# ---- what counts as an error of the communication --------------------------------------------------------------------


@pytest.mark.extended(but=("killed",))
@pytest.mark.off_device("gloo's errors")
@pytest.mark.parametrize("how", ["killed", "late"])
def test_errors_of_gloo_are_recognised(how: str) -> None:
    def run() -> Any:
        dist.init_process_group("gloo")
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))  # not before: setting up may take longer
        if os.environ["RANK"] == "1":
            if how == "killed":
                os.kill(os.getpid(), 9)
            time.sleep(4)
        found = []
        for _ in range(2):  # the second meets a connection that gloo has given up
            try:
                dist.all_reduce(torch.ones(1))
            except RuntimeError as error:
                found.append((is_communication_error(error), str(error)))
        return found

    found = run_ranks(run, expect="any", timeout=60)[0].value
    assert found and all(is_one for is_one, _ in found), found


def test_errors_of_a_store_are_recognised_and_lookalikes_are_not() -> None:
    with pytest.raises(RuntimeError) as timed_out:
        a_store().wait(["never"], timedelta(milliseconds=50))
    assert is_communication_error(timed_out.value)
    assert is_communication_error(dist.DistBackendError("NCCL error"))
    assert is_communication_error(RuntimeError("Application timeout caused pair closure"))
    for text in (
        "my gloomy loss",
        "gloo is not built",
        "the igloo/door.cc is open",
        "Timed out waiting",
        "pair closure",
    ):
        assert not is_communication_error(RuntimeError(text))
    place = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] "
    assert is_communication_error(RuntimeError(f"{place}Connection closed by peer [127.0.0.1]:1"))
    assert not is_communication_error(ValueError(place))


# ---- models that are not alike ---------------------------------------------------------------------------------------


def test_ranks_that_agree_reduce_64_bytes_and_others_send_little(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[Counter[str], str, str, str]:
        dist.init_process_group("gloo")
        calls: Counter[str] = Counter()
        for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast_object_list"):
            method = getattr(dist, name)
            monkeypatch.setattr(dist, name, lambda *a, n=name, m=method, **k: (calls.update([n]), m(*a, **k))[1])
        rank, facts = dist.get_rank(), {f"parameter {k}": "(1,)" for k in range(1000)}
        require_same("attach()", facts)
        alike = calls.copy()
        texts = []
        for differing in (
            {"parameter 7": "(2,)"} if rank == 2 else {},
            {"parameter 9": f"({rank},)", **({"added": "x"} if rank == 1 else {})},
            {f"parameter {k}": f"({rank % 2},)" for k in range(10)},
        ):
            with pytest.raises(ValueError) as error:
                require_same("attach()", facts | differing, dist.new_group())
            texts.append(str(error.value))
        assert calls["all_gather_object"] == 0
        return alike, *texts

    results = run_ranks(run, world_size=6)
    for alike, one, kinds, many in results:
        assert alike == {"all_reduce": 1}
        assert "\n  parameter 7: (1,) on rank 0, 1, 3, 4, 5; (2,) on rank 2\n" in one
        assert (
            "  parameter 9: (0,) on rank 0; (1,) on rank 1; (2,) on rank 2; (3,) on rank 3; something else on" in kinds
        )
        assert "  added: missing on rank 0, 2, 3, 4, 5; x on rank 1\n" in kinds
        assert many.count("(0,) on rank 0, 2, 4; (1,) on rank 1, 3, 5") == 5 and "\n  and 5 more\n" in many
    assert len({tuple(texts) for _, *texts in results}) == 1


def test_a_process_group_that_is_gone_is_not_kept() -> None:
    """Nor is its store: the next one at its address would find what was written to it."""

    def run() -> tuple[bool, bool]:
        import gc

        store = a_store()
        kept = weakref.ref(store)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        rank_status()
        del store
        dist.destroy_process_group()
        gc.collect()
        assert module._current is not None
        return module._current[0]() is None, kept() is None

    assert run_ranks(run, world_size=1) == [(True, True)]


def test_one_connection_more_than_the_process_group_has() -> None:
    def run() -> int:
        def sockets() -> int:
            links = (file.readlink() for file in Path("/proc/self/fd").iterdir() if file.is_symlink())
            return sum(link.name.startswith("socket") for link in links)

        dist.init_process_group("gloo")
        before = sockets()
        rank_status()
        return sockets() - before

    assert run_ranks(run)[1] == 1  # of the rank that does not host the store


def test_the_line_of_a_package_between_comes_with_that_of_the_program() -> None:
    """As where one logs the parameters of a ZeRO-3 model on one rank alone."""
    ours = ("/env/lib/python3.12/site-packages/torch/nn/modules/module.py", 7, "_call_impl")
    logger = ("/env/lib/python3.12/site-packages/wandb/wandb_torch.py", 156, "log_tensor_stats")
    hook = ("/env/lib/python3.12/site-packages/wandb/wandb_torch.py", 90, "hook")
    program = ("/home/someone/train.py", 24, "main")
    assert program_line([ours, program]) == "train.py:24 main"
    assert program_line([ours, logger, hook, ours, program]) == "wandb_torch.py:156 log_tensor_stats < train.py:24 main"
    assert program_line([ours, logger, hook]) == "wandb_torch.py:156 log_tensor_stats"
    assert program_line([ours]) == ""
