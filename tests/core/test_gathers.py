"""U1: gathers over several process groups are issued in one order on all ranks, and the result never varies."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.comm import comm

from tests.harness import engines
from tests.harness.data import noise
from tests.harness.groups import LAYOUTS, WORLD, Model, Reads, data, make_engine, sgd
from tests.harness.networks import stack
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import SIMULATED, RanksFailed, run_ranks
from tests.harness.strict import strict
from zerosync_strategy import attach
from zerosync_strategy.core.comm.collectives import new_group, timeout_of
from zerosync_strategy.core.comm.journal import Traffic
from zerosync_strategy.core.engine import gathering, zero3
from zerosync_strategy.core.params.issuing import GatherCount, Issuing
from zerosync_strategy.core.params.scheduler import GatherScheduler

Issued = tuple[tuple[int, ...], int, tuple[int, ...]]  # the ranks of a gather, its bytes, and of which parameters
numbers = noise(3, 6)
DEPTHS = [0, 1, 80, 150, 10**6]  # elements to prefetch: nothing, then one, two and four parameters ahead, and all


@contextmanager
def recorded(engine: Any) -> Iterator[list[Issued]]:
    """The gathers that this rank issues, in their order, those of readers included."""
    issued: list[Issued] = []
    stock = Issuing.begin

    def begin(self: Issuing, group: Any, ids: tuple[int, ...], digested: bytes) -> Any:
        nbytes = sum(zero3.full_bytes(param) for param in engine.module.parameters() if zero3.param_id(param) in ids)
        issued.append((tuple(dist.get_process_group_ranks(group.process_group)), nbytes, ids))
        return stock(self, group, ids, digested)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Issuing, "begin", begin)
        yield issued


def run(depth: int, steps: int = 5, kind: type[Model] = Model, **zero: Any) -> tuple[list[float], list[Issued]]:
    """Losses and gathers of some optimizer steps, one of which skips a layer on all ranks."""
    rank = int(os.environ["RANK"])
    engine = make_engine(LAYOUTS["grid"], sgd, zero={"stage3_prefetch_bucket_size": depth, **zero}, kind=kind)
    zerosync = attach(engine)
    losses = []
    with recorded(engine) as issued:
        for k in range(steps):
            loss = engine(data(k, rank), skip=k == 3)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    zerosync.detach()
    engine.destroy()
    return losses, issued


def one_order_for_all(by_rank: list[list[Issued]]) -> bool:
    """Whether all ranks could issue their gathers one after the other, each on all its ranks at once."""
    todo = [list(reversed(issued)) for issued in by_rank]
    while any(todo):
        for issued in filter(None, todo):
            ranks, *_ = issued[-1]
            if all(todo[rank] and todo[rank][-1] == issued[-1] for rank in ranks):
                for rank in ranks:
                    todo[rank].pop()
                break
        else:
            return False
    return True


@pytest.mark.parametrize(
    ("depths", "times"), [(DEPTHS[::2], 1), pytest.param(DEPTHS, 2, marks=pytest.mark.extended)], ids=["three", "ten"]
)
def test_one_order_at_every_depth_and_the_same_losses_in_many_runs(depths: list[int], times: int) -> None:
    def repeat() -> list[Any]:
        return [run(depth) for depth in depths for _ in range(times)]

    ranks = run_ranks(repeat, world_size=WORLD)
    for losses, *others in ([losses for losses, _ in of_rank] for of_rank in ranks):
        assert all(other == losses for other in others)
    for by_rank in zip(*([issued for _, issued in of_rank] for of_rank in ranks), strict=True):
        assert one_order_for_all(list(by_rank))
        # Rows, columns and all: the same place in the order on every rank, whichever row or column is meant.
        kinds = [[(len(group), group[-1] - group[0], size) for group, size, _ in issued] for issued in by_rank]
        assert all(kind == kinds[0] for kind in kinds)
        assert len(Counter(group for group, *_ in by_rank[0])) == 3


@pytest.mark.extended
def test_reads_are_in_the_order_too() -> None:
    def repeat() -> list[Any]:
        without = run(0, stage3_max_reuse_distance=0)[1]
        return without, [run(depth, kind=Reads, stage3_max_reuse_distance=0) for depth in DEPTHS[::2]]

    ranks = run_ranks(repeat, world_size=WORLD)
    for without, by_depth in ranks:
        assert all(losses == by_depth[0][0] for losses, _ in by_depth)
        assert len(by_depth[0][1]) > len(without)
    for by_rank in zip(*([issued for _, issued in by_depth] for _, by_depth in ranks), strict=True):
        assert one_order_for_all(list(by_rank))


@pytest.mark.extended
def test_another_order_on_some_ranks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: rank 0 issues what it wants at once in the reverse order of its groups."""
    stock = GatherScheduler.in_order

    def in_order(self: GatherScheduler, params: Iterable[Any]) -> Iterator[list[Any]]:
        found = list(stock(self, params))
        yield from reversed(found) if os.environ["RANK"] == "0" else found

    monkeypatch.setattr(GatherScheduler, "in_order", in_order)
    if os.environ.get(SIMULATED):  # by the communicator itself, too
        with pytest.raises(RanksFailed, match="may wait for one another in a circle"):
            run_ranks(run, 10**6, world_size=WORLD)
        return
    ranks = run_ranks(run, 10**6, world_size=WORLD)
    assert not one_order_for_all([issued for _, issued in ranks])


def test_a_backends_own_gathers_are_in_deepspeeds_log_where_it_keeps_one() -> None:
    def run() -> tuple[list[bool], list[float]]:
        attach(make_engine(LAYOUTS["grid"], sgd))
        count = GatherCount()
        send, log, logged = gathering.backends_all_gather(count), comm.comms_logger, []
        own, both = torch.full((1,), float(os.environ["RANK"])), torch.empty(WORLD)
        for log.enabled in (False, True):
            log.prof_all = log.enabled
            send([own], [both], torch.distributed.group.WORLD, both.nbytes)()
            logged.append("all_gather_into_tensor" in log.comms_dict)
        assert count.counter.take() == {"all_gather_into_tensor": Traffic(2, 2 * 4 * (WORLD - 1))}
        return logged, both.tolist()

    assert run_ranks(run, world_size=WORLD) == [([False, True], [float(rank) for rank in range(WORLD)])] * WORLD


@pytest.mark.extended(but=("own_communicator",))
@pytest.mark.parametrize("sharing", ["per_group", "own_communicator"])
def test_gathers_over_a_communicator_of_their_own(sharing: str) -> None:
    """By NCCL's rules: no reduction is between them, both have one order on all ranks, and nothing is left of it."""

    def run() -> tuple[float, bool, int]:
        engines.start()
        with strict() as communicator:
            net, plain = stack(6, 3), stack(6, 3)
            zero = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
            engine = engines.make_engine(net, torch.optim.SGD(net.parameters(), lr=0.1), 3, zero)
            before = len(dist.distributed_c10d._world.pg_map)
            zerosync = attach(engine, unshard_streams=sharing, grad_memory_budget=0)
            communicator._recorded.clear()  # what DeepSpeed has called to build the engine
            oracle = Oracle(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
            for k in range(4):
                engine.backward(engine(numbers(k, engines.rank())).square().mean())
                oracle.backward(lambda r, k=k: plain(numbers(k, r)).square().mean())
                if k % 2:
                    engine.step()
                    oracle.step()
            called = defaultdict(set)
            for entry, *_ in communicator._recorded:
                called[entry["profiling_name"]].add(entry["process_group"])
            error = distance(full_parameters(net), full_parameters(plain))
            zerosync.detach()
            left = len(dist.distributed_c10d._world.pg_map) - before
        one_by_one = called["nccl:_allgather_base_"]  # on the simulated device
        gathers = called["nccl:allgather_into_tensor_coalesced_"] | one_by_one
        reductions = called["nccl:_reduce_scatter_base_"]
        assert gathers and reductions
        return error, gathers.isdisjoint(reductions), left

    assert run_ranks(run) == [(0.0, sharing == "own_communicator", 0)] * 2


def test_groups_that_are_made_have_the_timeout_of_the_user() -> None:
    """Also like one that was made without it, as DeepSpeed's."""

    def known() -> timedelta:
        engines.start(timedelta(seconds=77))
        return timeout_of(new_group([0, 1], dist.new_group([0, 1]), torch.device("cpu")))

    assert run_ranks(known) == [timedelta(seconds=77)] * 2
