"""Which backward is taken for the last, by ranks that may make different numbers of backwards: threads of one process.

Each rank has a real window, and a reducer whose collectives meet those of the other ranks: the i-th of each must be of
the same kind, as on NCCL.
"""

import contextlib
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from zerosync_strategy.core.gradients.counts import LastBackward
from zerosync_strategy.core.gradients.window import Window


class Network:
    """Sums what all ranks give, and raises on all of them if they call different things."""

    def __init__(self, size: int) -> None:
        self._given: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def sum(self, rank: int, kind: str, numbers: list[float]) -> list[float]:
        self._given[rank] = kind, numbers
        self._barrier.wait()
        kinds, given = zip(*self._given, strict=True)
        self._barrier.wait()
        assert len(set(kinds)) == 1, kinds
        return [sum(each) for each in zip(*given, strict=True)]


class Reducer:
    """Stands in for core's: one bucket of one number. ``result``: the gradient of the last step."""

    keeps_gradients = keeps_some = True
    only_adds = False
    pipeline = SimpleNamespace(begun=None)

    def __init__(self, network: Network, rank: int) -> None:
        self._network, self._rank = network, rank
        self.local = self.shard = self.result = 0.0
        self.needs_reduce = self._streams = False
        self.passes = 0

    def begin_backward(self, last: bool, first_uses: object, ready: object) -> None:
        self._streams, self.needs_reduce = last, True

    def end_backward(self) -> bool:
        streams, self._streams = self._streams, False
        if streams:
            self.reduce()
        return streams

    def reduce(self, every: bool = False) -> None:
        (total,) = self._network.sum(self._rank, "pass", [self.local])
        self.shard += total
        self.local, self.needs_reduce = 0.0, False
        self.passes += 1

    def settle(self, last: LastBackward) -> None:
        self._sums = self._network.sum(self._rank, "norm", list(last.numbers(self.needs_reduce)))

    def agrees(self, last: LastBackward) -> bool:
        return True

    def hear(self, last: LastBackward) -> bool:
        return last.hear(self._sums)

    def share_left(self) -> None:
        (left,) = self._network.sum(self._rank, "left", [self.needs_reduce])
        self.needs_reduce = bool(left)

    def drop(self) -> None:
        self.local = self.shard = 0.0
        self.needs_reduce = False

    reset = interrupted = reset_counts = drop

    def close(self) -> None:
        self.result, self.shard = self.shard, 0.0


class Rank:
    def __init__(self, network: Network, rank: int, first: int = 1) -> None:
        self.reducer = Reducer(network, rank)
        last = LastBackward(True, first)
        self.window = Window(self.reducer, last, lambda what: contextlib.nullcontext())  # type: ignore[arg-type]

    def backward(self, gradient: float) -> None:
        with self.window.engine_backward():
            self.reducer.local += gradient

    def step(self) -> tuple[float, int]:
        """The stepped gradient, and the number of passes over the gradients."""
        with self.window.closing():
            pass
        self.window.end_step()
        passes, self.reducer.passes = self.reducer.passes, 0
        return self.reducer.result, passes


def run(size: int, program: Callable[[Rank, int], Any], first: int = 1) -> list[Any]:
    network = Network(size)
    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(program, Rank(network, rank, first), rank) for rank in range(size)]
        return [each.result(60) for each in ranks]


def test_random_programs_of_ranks_that_disagree() -> None:
    """Every gradient is stepped once, on every rank alike, in the same order of collectives."""
    for seed in range(150):
        draw = random.Random(seed)
        size = draw.randint(2, 4)
        steps = []
        usual = draw.randint(1, 4)
        for _ in range(12):
            if draw.random() < 0.2:
                usual = draw.randint(1, 4)
            counts = [max(1, usual + draw.choice([-1, 0, 1])) if draw.random() < 0.15 else usual for _ in range(size)]
            drops = draw.randint(1, min(counts)) if draw.random() < 0.15 else 0  # after so many backwards, on all ranks
            promises = draw.random() < 0.1 and len(set(counts)) == 1
            steps.append((counts, drops, promises, draw.randint(0, 10**6)))

        def program(rank: Rank, number: int, steps: Any = steps) -> list[tuple[float, int]]:
            results = []
            for counts, drops, promises, base in steps:
                for k in range(counts[number]):
                    if promises and k + 1 == counts[number]:
                        rank.window.expect_last()
                    rank.backward(base + 100 * number + k)
                    if k + 1 == drops:
                        rank.window.zero_grad()
                results.append(rank.step())
            return results

        wanted = [
            float(sum(base + 100 * number + k for number, count in enumerate(counts) for k in range(drops, count)))
            for counts, drops, _, base in steps
        ]
        for of_rank in run(size, program, first=draw.randint(1, 2)):
            assert [gradient for gradient, _ in of_rank] == wanted, seed
            assert all(passes <= 2 + bool(drops) for (_, passes), (_, drops, _, _) in zip(of_rank, steps, strict=True))


def passes_of(counts: list[int], first: int = 1) -> list[int]:
    """By step, the passes of two ranks that make ``counts`` of backwards."""

    def program(rank: Rank, _: int) -> list[int]:
        passes = []
        for count in counts:
            for _ in range(count):
                rank.backward(1.0)
            gradient, of_step = rank.step()
            assert gradient == 2.0 * count
            passes.append(of_step)
        return passes

    one, other = run(2, program, first)
    assert one == other
    return one


def test_only_a_window_that_surprises_reduces_twice() -> None:
    assert passes_of([1, 1, 1]) == [1, 1, 1]
    assert passes_of([4, 4, 4, 2, 4, 4, 4, 2, 4, 4]) == [2, 1, 1, 1, 2, 1, 1, 1, 1, 1]  # short ends of epochs
    assert passes_of([4, 4], first=4) == [1, 1]
    assert passes_of([2, 1] * 20).count(2) == 2  # a program that surprises often is not expected any more
    assert passes_of([1, 1, 2, 2] * 20).count(2) <= 4


def test_the_expected_backward_reduces_and_no_other() -> None:
    def program(rank: Rank, _: int) -> list[list[int]]:
        found = []
        for _ in range(3):
            rank.reducer.passes = 0
            found.append([])
            for _ in range(3):
                rank.backward(1.0)
                found[-1].append(rank.reducer.passes)
            rank.step()
        return found

    assert run(2, program)[0] == [[1, 1, 1], [0, 0, 1], [0, 0, 1]]

    def not_the_last(rank: Rank, _: int) -> int:
        rank.window.expect_last(False)
        rank.backward(1.0)
        with rank.window.last.more_follow():
            rank.backward(1.0)
        return rank.reducer.passes

    assert run(2, not_the_last) == [0, 0]


@pytest.mark.filterwarnings("ignore:ZeroSync dropped the gradients")
@pytest.mark.parametrize("how", ["zero_grad", "abort"])
def test_a_pass_that_some_ranks_have_dropped_is_an_error_on_all(how: str) -> None:
    def program(rank: Rank, number: int) -> str:
        rank.backward(1.0)  # expected to be the last
        if number == 0:
            rank.window.zero_grad() if how == "zero_grad" else rank.window.abort("a test")
            rank.backward(1.0)
        with pytest.raises(RuntimeError) as error:
            rank.step()
        return str(error.value)

    for text in run(3, program):
        assert "found that 1 of 3 ranks had dropped gradients" in text and "overlap_last=False" in text
