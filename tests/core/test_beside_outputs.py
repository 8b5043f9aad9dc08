"""ZeRO-3, nothing held: a backward may reach a unit by tensors that are none of its outputs, first or alone."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.engines import make_engine, rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.engine.saved_tensors import FIRST_STEPS

WIDTH, STEPS = 6, 5
ZERO = {f"stage3_{name}": 0 for name in ("param_persistence_threshold", "prefetch_bucket_size", "max_reuse_distance")}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.exit = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.kept: Any = None

    def forward(self, x: torch.Tensor, how: str, cache: list[torch.Tensor]) -> torch.Tensor:
        if how == "torch.func":  # refuses to run under hooks on saved tensors
            x = x + torch.func.grad(lambda y: self.first(y).tanh().sum())(x)
        hidden = self.first(x).tanh()
        if how == "a cache":
            cache.append(self.exit(hidden))
        output = self.last(hidden)
        if how in ("a loss of its own", "an early exit"):
            self.kept = self.exit(hidden).square().mean()
        return output[:] if how == "a view that is changed" else output


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        cache: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, how, cache)
            if how == "a view that is changed":
                x += 1
        if how == "an early exit":  # of the second block, whose output leads nowhere
            return self.blocks[0].kept + self.blocks[1].kept
        if how == "a cache":  # of the last two, as well
            return sum(keys.square().mean() for keys in cache[1:]) + cache[0].mean()
        loss = x.square().mean()
        return loss + sum(block.kept for block in self.blocks) if how == "a loss of its own" else loss


def values(step: int, of_rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + of_rank))


WAYS = ["a view that is changed", "a loss of its own", "a cache", "an early exit", "torch.func"]


OFF_DEVICE = pytest.mark.off_device("the race checker knows no transforms of torch.func")
CASES = [
    pytest.param(how, begins, marks=OFF_DEVICE if how == "torch.func" else ())
    for how in WAYS
    for begins in (0, FIRST_STEPS + 1)
    if begins == 0 or how != "a cache"
]


@pytest.mark.parametrize(("how", "begins"), CASES)
def test_it_trains_as_in_plain_torch(how: str, begins: int) -> None:
    """Also where only some steps do it. A unit's parameters have no memory between its forward and its backward."""

    def run() -> tuple[float, list[int]]:
        net, plain = Net(), Net()
        oracle = Oracle(plain, torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9))
        engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9), 3, ZERO)
        attach(engine)
        between = []
        for step in range(STEPS + 1):
            now = how if step >= begins and step != STEPS - 1 else "nothing"
            for k in range(2):
                loss = engine(values(2 * step + k, rank()), now)
                between.append(sum(param.ds_status.name == "AVAILABLE" for param in net.parameters()))
                engine.backward(loss)
                oracle.backward(lambda of, step=step, k=k, now=now: plain(values(2 * step + k, of), now))
            engine.step()
            oracle.step()
        left = between[2 * begins + 1 :]  # after the first that it had not expected
        engine.destroy()
        return distance(full_parameters(net), full_parameters(plain)), left

    for error, between in run_ranks(run):
        assert error == 0.0 and set(between) == {0}, (how, error, between)


def test_what_comes_late_and_leaves_no_trace_is_refused() -> None:
    """Keys made before the output, of a block whose output leads nowhere: an error says what helps, and it does."""

    def run() -> None:
        for options in ({}, {"param_memory_budget": "all"}):
            engine = make_engine(net := Net(), torch.optim.SGD(net.parameters(), lr=0.3), 3, ZERO)
            attach(engine, **options)
            for _ in range(FIRST_STEPS):
                engine.backward(engine(values(0, rank()), "nothing"))
                engine.step()
            if options:
                engine.backward(engine(values(0, rank()), "a cache"))
            else:
                with pytest.raises(RuntimeError, match=r"(?s)modified by an inplace.*param_memory_budget='all'"):
                    engine.backward(engine(values(0, rank()), "a cache"))
            engine.backward(engine(values(0, rank()), "nothing"))
            engine.step()
            engine.destroy()

    run_ranks(run)
