"""W4: ranks that wait for one another in different collective calls get an error within seconds, and no others do."""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers its backend

from tests.harness.copying import loss_of, make_engine, oracle
from tests.harness.engines import rank
from tests.harness.oracle import distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.comm import waits
from zerosync_strategy.core.comm.waits import Call
from zerosync_strategy.core.failures import deadlock
from zerosync_strategy.core.failures.deadlock import Waiting, deadlocked

pytestmark = pytest.mark.off_device("NCCL's calls wait on the device, where the host watches none")

SHARDED = dict.fromkeys(
    ("stage3_param_persistence_threshold", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size"), 0
)


def impatient() -> None:
    deadlock.PATIENCE_SECONDS, deadlock._POLL_SECONDS = 0.2, 0.05


def save(engine: Any, path: Path) -> None:
    engine.save_checkpoint(str(path))


def forward(engine: Any, path: Path) -> None:
    with torch.no_grad():
        engine(torch.ones(2, 8))


def collect(engine: Any, path: Path) -> None:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())[::-1]):
        pass


ALONE: dict[str, tuple[int, Callable[[Any, Path], None], str]] = {
    "saves, stage 2": (2, save, "in the attempt to write the checkpoint in"),
    "saves, stage 3": (3, save, "in the attempt to write the checkpoint in"),
    "runs a forward": (3, forward, "in the gather of"),
    "collects parameters": (3, collect, "in the gather of"),
}


@pytest.mark.parametrize("what", ALONE)
def test_one_rank_alone(what: str, tmp_path: Path) -> None:
    stage, act, words = ALONE[what]

    def run() -> None:
        impatient()
        engine = make_engine(stage, SHARDED if stage == 3 else {})
        attach(engine)
        for k in range(5):
            if k == 3 and rank() == 0:
                act(engine, tmp_path)
            engine.backward(loss_of(engine, k, rank()))
            engine.step()

    outcomes = run_ranks(run, expect="any", timeout=60)
    for outcome in outcomes:
        assert outcome.error == "RankError", str(outcome)
        assert "would wait for ever in" in outcome.message and "on all ranks, not on one" in outcome.message
        assert f"\n  rank 0: {words}" in outcome.message and "\n  rank 1: in the " in outcome.message, outcome.message


def test_slow_ranks_are_waited_for() -> None:
    """In a gather, in a reduction and in a collective of torch; the others ask in vain whether they may give up."""

    def run() -> float:
        impatient()
        engine = make_engine(3, SHARDED)
        attach(engine)
        for k in range(2):
            if rank() == k % 2:
                time.sleep(0.6)
            loss = loss_of(engine, k, rank())
            if rank() == k % 2:
                time.sleep(0.6)
            engine.backward(loss)
            engine.step()
            if rank() == k % 2:
                time.sleep(0.6)
            dist.barrier()
        return distance(full_parameters(engine.module), oracle(2, 1))

    assert run_ranks(run) == [0.0, 0.0]


GATHER, BARRIER = Call("0", "", 7, 1), Call("0", "barrier", 0, 5)


def waiting(call: Call, collectives: int = 4, exchanges: int = 0, group: str = "0") -> Waiting:
    return Waiting(call, (0, 1, 2), {group: collectives}, {"0": {7: exchanges}})


@pytest.mark.parametrize(
    ("states", "found"),
    [
        ({0: waiting(GATHER, exchanges=1), 1: waiting(BARRIER, 5)}, {0, 1}),
        ({0: waiting(GATHER, exchanges=1), 1: waiting(BARRIER, 5), 2: waiting(BARRIER, 5)}, {0, 1, 2}),
        # A rank of which nothing is known may compute.
        ({0: waiting(GATHER, exchanges=1), 1: waiting(GATHER, exchanges=1)}, set()),
        # What rank 0 waits for is on its way from rank 1, which has gone on: as a large gather by torch.
        ({0: waiting(BARRIER, 5), 1: waiting(GATHER, 5, exchanges=1)}, set()),
        ({0: waiting(GATHER, exchanges=1), 1: waiting(BARRIER, 5, exchanges=1)}, set()),
        # The numbers of this group are not known to be alike.
        ({0: waiting(GATHER, exchanges=1, group="1"), 1: waiting(BARRIER, 5)}, set()),
        ({0: waiting(BARRIER, 5), 1: waiting(Call("0", "broadcast", 0, 5), 5)}, {0, 1}),
    ],
)
def test_only_what_is_certain(states: Mapping[int, Waiting], found: set[int]) -> None:
    assert deadlocked(states) == found


def test_a_group_that_was_made_without_a_backend_is_watched() -> None:
    """Its backend is "undefined" for torch, and gloo on the CPU."""

    def run() -> None:
        impatient()
        dist.init_process_group(timeout=timedelta(seconds=60))
        engine = make_engine(2)
        attach(engine)
        for k in range(2):
            if k and rank() == 0:
                dist.barrier()
            engine.backward(loss_of(engine, k, rank()))
            engine.step()

    alone, other = run_ranks(run, expect="any", timeout=50)
    assert alone.error == "RuntimeError" and other.error == "RankError", str(other)
    assert "Verdict: rank 0 alone waits for torch.distributed.barrier(), window 2" in other.message, other.message


def test_calls_of_a_backend_for_another_device_are_none_of_gloos(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `cpu:gloo,cuda:nccl`: ranks that wait for their device in different calls may have issued both."""

    def run() -> tuple[int, dict[str, int], float]:
        impatient()
        dist.init_process_group("cpu:gloo,meta:fake")
        engine = make_engine(2)
        attach(engine)
        given_up: list[Any] = []
        monkeypatch.setattr(waits, "give_up", given_up.append)
        on_device = torch.ones(2, device="meta")
        slow = SimpleNamespace(wait=partial(time.sleep, 1.5))  # in no frame of Python's
        with monkeypatch.context() as patch:
            if rank() == 0:
                patch.setattr(dist.ProcessGroup, "allreduce", lambda *_: slow)
                dist.all_reduce(on_device)
                dist.send(on_device, 1)  # is not gloo's either, whose numbers are the same on both ranks still
            else:
                dist.all_reduce(on_device, async_op=True)
                patch.setattr(dist.ProcessGroup, "broadcast", lambda *_: slow)
                dist.broadcast(on_device, 0)
        numbers = waits.collectives()
        engine.backward(loss_of(engine, 0, rank()))
        engine.step()
        return len(given_up), numbers, distance(full_parameters(engine.module), oracle(1, 1))

    (given_up, numbers, error), of_other = run_ranks(run)
    assert given_up == of_other[0] == 0
    assert numbers == of_other[1] and numbers
    assert (error, of_other[2]) == (0.0, 0.0)
