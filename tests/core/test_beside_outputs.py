"""ZeRO-3, nothing held: a backward may reach a unit by tensors that are none of its outputs, first or alone."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.engines import make_engine, rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.engine.hooks import FIRST_STEPS

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


@pytest.mark.extended(
    but=(
        "a loss of its own-0",
        "a loss of its own-3",
        "torch.func-0",
    )
)
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


class Table(nn.Module):
    """Learned positions or queries, as Perceiver has them: returned without a computation, in their own memory."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, how: str) -> Any:
        if how == "halves in a dictionary":
            return {"halves": list(self.rows.chunk(2))}
        rows = {"themselves": self.rows, "detached": self.rows.detach(), "transposed": self.rows.t()}
        return rows[how] if how in rows else self.rows[None].expand(2, -1, -1)


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.table, self.last = nn.Linear(WIDTH, WIDTH), Table(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        rows = self.table(how)
        if how == "halves in a dictionary":
            rows = torch.cat(rows["halves"])
        if how == "transposed":
            rows = rows.t()
        return self.last(self.first(x) * rows).square().mean()


RETURNED = ["themselves", "detached", "transposed", "halves in a dictionary", "expanded", "under a transform"]


@pytest.mark.extended(
    but=(
        "themselves",
        "halves in a dictionary",
    )
)
@pytest.mark.parametrize("how", [pytest.param(how, marks=pytest.mark.off_device("transforms of torch.func"))
                                 if how == "under a transform" else how for how in RETURNED])  # fmt: skip
def test_a_unit_may_return_its_parameters_or_views_of_them(how: str) -> None:
    """They are there for what reads them, and for its backward, also of a second graph; the step frees them."""

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if how != "under a transform":
            return model(x, how)
        return model(x, how) + torch.func.jvp(lambda y: model(y, how), (x,), (x,))[1]

    def run() -> tuple[float, int]:
        net, plain = WithTable(), WithTable()
        oracle = Oracle(plain, torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9))
        engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9), 3, ZERO)
        attach(engine)
        for step in range(STEPS):
            with torch.no_grad():
                assert torch.allclose(engine(values(step, 0), how), plain(values(step, 0), how), atol=1e-5)
            losses = [loss_of(engine, values(2 * step + k, rank())) for k in range(2)]
            for loss in losses:
                engine.backward(loss)
            for k in range(2):
                oracle.backward(lambda of, step=step, k=k: loss_of(plain, values(2 * step + k, of)))
            engine.step()
            oracle.step()
        left = sum(param.ds_status.name == "AVAILABLE" for param in net.parameters())
        error = distance(full_parameters(net), full_parameters(plain))
        engine.destroy()
        return error, left

    assert run_ranks(run) == [(0.0, 0), (0.0, 0)]
