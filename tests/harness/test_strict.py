"""The communicator for tests has NCCL's rules: what it matches, what it refuses, and when data is there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.engines import rank, start
from tests.harness.ranks import RanksFailed, run_ranks
from tests.harness.strict import StrictError, strict
from zerosync_strategy.core.failures.flight_recorder import recorded


def on_ranks(program: Callable[[int], Any], world_size: int = 2) -> list[Any]:
    def run() -> Any:
        start()
        with strict():
            return program(rank())

    return run_ranks(run, world_size=world_size)


def all_kinds(number: int) -> dict[str, Any]:
    """Each collective of torch.distributed, on numbers that tell which rank's they are."""
    own = torch.arange(6.0) + 10 * number
    results: dict[str, Any] = {}

    def has(name: str, *tensors: torch.Tensor) -> None:
        results[name] = [tensor.tolist() for tensor in tensors]

    summed, largest, mean = own.clone(), own.clone(), own.bfloat16()
    dist.all_reduce(summed)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    has("all_reduce", summed, largest, mean)
    parts = [torch.empty(6) for _ in range(3)]
    dist.all_gather(parts, own)
    flat = torch.empty(18)
    dist.all_gather_into_tensor(flat, own)
    has("all_gather", *parts, flat)
    shard = torch.empty(2)
    dist.reduce_scatter_tensor(shard, own)
    shards = torch.empty(2)
    dist.reduce_scatter(shards, list(own.clone().chunk(3)))
    has("reduce_scatter", shard, shards)
    even, uneven = torch.empty(6), torch.empty(3 * (number + 1))
    dist.all_to_all_single(even, own)
    dist.all_to_all_single(uneven, own, [number + 1] * 3, [1, 2, 3])
    listed = [torch.empty(2) for _ in range(3)]
    dist.all_to_all(listed, list(own.chunk(3)))
    has("all_to_all", even, uneven, *listed)
    given, at_root = own.clone(), own.clone()
    dist.broadcast(given, 1)
    dist.reduce(at_root, 2)
    has("rooted", given, at_root if number == 2 else torch.zeros(1))
    gathered = [torch.empty(6) for _ in range(3)] if number == 0 else None
    dist.gather(own, gathered, 0)
    scattered = torch.empty(6)
    dist.scatter(scattered, [own * k for k in range(3)] if number == 1 else None, 1)
    has("gather and scatter", *(gathered or []), scattered)
    ring = torch.empty(6)
    for sends in (False, True) if number == 0 else (True, False):  # a ring that stops nowhere
        work = dist.isend(own, (number + 1) % 3) if sends else dist.irecv(ring, (number - 1) % 3)
        assert work is not None
        work.wait()
    has("point to point", ring)
    words: list[Any] = [None] * 3
    dist.all_gather_object(words, f"rank {number}")
    dist.barrier()
    return results | {"objects": words}


def test_every_collective_computes_what_gloo_does() -> None:
    assert on_ranks(all_kinds, 3) == run_ranks(lambda: start() or all_kinds(rank()), world_size=3)


def test_results_are_there_when_somebody_has_waited() -> None:
    def program(number: int) -> Any:
        rows = torch.full((2, 4), -1.0)
        rows[number] = number
        gather = dist.all_gather_into_tensor(rows.view(-1), rows[number], async_op=True)
        total = torch.ones(4)
        reduce = dist.all_reduce(total, async_op=True)
        before = rows[number].tolist(), rows[1 - number].isnan().all().item(), total.isnan().all().item()
        gather.wait()
        reduce.wait()
        return before, rows.tolist(), total.tolist()

    for number, found in enumerate(on_ranks(program)):
        assert found == (([number] * 4, True, True), [[0.0] * 4, [1.0] * 4], [2.0] * 4)


def test_a_group_of_calls_is_one_launch() -> None:
    def run() -> Any:
        start()
        with strict() as communicator:
            tensors, group = [torch.full((2,), rank() + 1.0) for _ in range(2)], dist.group.WORLD
            group._start_coalescing(torch.device("cpu"))  # type: ignore[union-attr]
            for root, tensor in enumerate(tensors):
                dist.reduce(tensor, root, async_op=True)
            work = group._end_coalescing(torch.device("cpu"))  # type: ignore[union-attr]
            there = not tensors[rank()].isnan().any()
            work.wait()
            (entry,) = recorded()  # of three
            found = entry.name, entry.number, entry.complete
            return there, tensors[rank()].tolist(), communicator.count["reduce"], communicator.count["launches"], found

    assert run_ranks(run) == [(False, [3.0, 3.0], 2, 1, ("nccl:reduce_", 1, True))] * 2


def swapped(number: int) -> None:
    calls = [dist.all_reduce, lambda tensor, **kwargs: dist.broadcast(tensor, 0, **kwargs)]
    works = [call(torch.ones(4), async_op=True) for call in (calls[::-1] if number else calls)]
    works[0].wait()


def of_another_size(number: int) -> None:
    dist.all_reduce(torch.ones(4 + number))


def of_another_dtype(number: int) -> None:
    dist.all_gather_into_tensor(torch.empty(8), torch.ones(4, dtype=[torch.float32, torch.bfloat16][number]))


def from_another_root(number: int) -> None:
    dist.broadcast(torch.ones(4), number)


def of_other_parts(number: int) -> None:
    dist.all_to_all_single(torch.empty(4), torch.ones(4), [2, 2], [[2, 2], [1, 3]][number])


def with_a_tag(number: int) -> None:
    work = dist.isend(torch.ones(4), 1, tag=7) if number == 0 else dist.irecv(torch.ones(4), 0, tag=7)
    assert work is not None
    work.wait()


def waited_for_alone(number: int) -> None:
    group = dist.group.WORLD
    group._start_coalescing(torch.device("cpu"))  # type: ignore[union-attr]
    work = dist.reduce(torch.ones(4), 0, async_op=True)
    group._end_coalescing(torch.device("cpu"))  # type: ignore[union-attr]
    work.wait()


def in_a_group_on_one_rank(number: int) -> None:
    if number:
        dist.reduce(torch.ones(4), 0)
    else:
        dist.group.WORLD._start_coalescing(torch.device("cpu"))  # type: ignore[union-attr]
        dist.reduce(torch.ones(4), 0, async_op=True)
        dist.group.WORLD._end_coalescing(torch.device("cpu")).wait()  # type: ignore[union-attr]


def of_two_groups_in_one(number: int) -> None:
    other = dist.new_group([0, 1])
    dist.group.WORLD._start_coalescing(torch.device("cpu"))  # type: ignore[union-attr]
    dist.reduce(torch.ones(4), 0, async_op=True, group=other)
    dist.group.WORLD._end_coalescing(torch.device("cpu"))  # type: ignore[union-attr]


def changed_in_a_group(number: int) -> None:
    dist.group.WORLD._start_coalescing(torch.device("cpu"))  # type: ignore[union-attr]
    given = torch.ones(4)
    dist.reduce(given, 0, async_op=True)
    given.add_(1)
    dist.group.WORLD._end_coalescing(torch.device("cpu"))  # type: ignore[union-attr]


def changed(number: int) -> None:
    given = torch.ones(4)
    work = dist.all_gather_into_tensor(torch.empty(8), given, async_op=True)
    given.add_(1)
    work.wait()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (swapped, ("allreduce float32 x 4", "broadcast float32 x 4 from 0", "test_strict.py")),
        (of_another_size, ("float32 x 4", "float32 x 5")),
        (of_another_dtype, ("float32 x 4", "bfloat16 x 4")),
        (from_another_root, ("from 0", "from 1")),
        (of_other_parts, ("elements", "expects 2")),
        (with_a_tag, ("tag 7",)),
        (waited_for_alone, ("is one of a group", "reduce float32 x 4")),
        (in_a_group_on_one_rank, ("1 of 1 in a group", "in the same place")),
        (of_two_groups_in_one, ("over another process group",)),
        (changed_in_a_group, ("its input was changed",)),
        (changed, ("its input was changed",)),
    ],
)
def test_what_nccl_does_not_match_is_an_error_of_all(program: Callable[[int], None], words: tuple[str, ...]) -> None:
    def refused(number: int) -> str:
        with pytest.raises(StrictError) as raised:
            program(number)
        return str(raised.value)

    def run() -> str:
        start()
        found = []
        with pytest.raises(StrictError, match="over"), strict():
            found.append(refused(rank()))
            raise StrictError("over")
        return found[0]

    for found in run_ranks(run):
        assert all(word in found for word in words), found


@pytest.mark.parametrize("alike", [True, False])
def test_two_groups_in_another_order_are_a_circle(alike: bool) -> None:
    def program(number: int) -> None:
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        ordered = groups if alike or number == 0 else groups[::-1]
        for work in [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in ordered]:
            work.wait()

    if alike:
        on_ranks(program)
    else:
        with pytest.raises(RanksFailed, match=r"different orders.*in a circle: allreduce.*then allreduce"):
            on_ranks(program)
