"""Parameters that no optimizer trains, as the weights under adapters: gathered once, where they are held (R4)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from tests.harness.data import noise
from tests.harness.engines import make_engine, rank
from tests.harness.oracle import Oracle, distance, full_parameters, of_trained
from tests.harness.ranks import run_ranks
from tests.harness.rounding import excess
from zerosync_strategy import attach
from zerosync_strategy.core.engine import zero3

WIDTH, RANK = 24, 2


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Adapted() for _ in range(3)])


def trained(net: nn.Module) -> Iterator[nn.Parameter]:
    return (param for param in net.parameters() if param.requires_grad)


data = noise(4, WIDTH)


NORM = 48  # bytes of its sum


class Pair:
    """An engine and plain torch, trained alike."""

    def __init__(self, **options: Any) -> None:
        self.net, self.plain = network(), network()
        # Biases persist; what is not held stays for no other forward.
        zero = {"stage3_param_persistence_threshold": 30, "stage3_max_reuse_distance": 0}
        self.engine = make_engine(self.net, torch.optim.AdamW(trained(self.net), lr=0.03), 3, zero)
        self.zerosync = attach(self.engine, **options)
        self.oracle = Oracle(self.plain, torch.optim.AdamW(trained(self.plain), lr=0.03))
        self.steps = 0

    def step(self) -> None:
        for k in (2 * self.steps, 2 * self.steps + 1):
            self.engine.backward(self.engine(data(k, rank())).square().mean())
            self.oracle.backward(lambda r, k=k: self.plain(data(k, r)).square().mean())
        self.engine.step()
        self.oracle.step()
        self.steps += 1

    def error(self) -> float:
        return distance(full_parameters(self.net), full_parameters(self.plain))


def sent(zerosync: Any) -> tuple[int, int]:
    return zerosync.report.bytes_sent, zerosync.report.floor_bytes


@pytest.mark.extended(but=("all",))
@pytest.mark.parametrize("budget", ["all", 3 * 4 * WIDTH * WIDTH])
@pytest.mark.off_device("NCCL's comparison of gathers, 16 bytes per step, is more than 2 % of so little")
def test_they_are_sent_once(budget: Any) -> None:
    """With a budget, the first window finds out what to hold, and the second gathers it."""
    numel = 3 * 2 * WIDTH * RANK
    of_trained = 4 * numel * (1 if budget == "all" else 4)  # the adapters are gathered for each forward and backward

    def run() -> float:
        pair = Pair(param_memory_budget=budget)
        pair.step()
        first, floor = sent(pair.zerosync)
        assert first > 4 * 3 * WIDTH * WIDTH / 2
        if budget == "all":
            assert first <= 1.02 * floor
        else:
            pair.step()
        for _ in range(2):
            if budget == "all":
                with deepspeed.zero.GatheredParameters(pair.net.parameters()):  # to read, as TRL does to generate
                    pass
            pair.step()
            later, floor = sent(pair.zerosync)
            assert floor == (of_trained + 4 * numel) // 2 and later <= 1.02 * floor + NORM
        return pair.error()

    assert run_ranks(run) == [0.0, 0.0]


def test_a_step_gathers_at_its_end_what_persists_alone() -> None:
    """What is held otherwise, in the same buckets, comes with the next window."""

    def run() -> None:
        net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        engine = make_engine(net, torch.optim.AdamW(net.parameters()), 3, {"stage3_param_persistence_threshold": 30})
        attach(engine, param_memory_budget="all")
        for k in range(3):
            engine.backward(engine(data(k, rank())).square().mean())
            engine.step()
            there = {name for name, param in net.named_parameters() if not zero3.is_released(param)}
            assert there == {name for name, _ in net.named_parameters() if "bias" in name}

    run_ranks(run)


def test_changes_of_them_take_effect(tmp_path: Path) -> None:
    """In place, by load_state_dict(), in a context, by a checkpoint; and a checkpoint has them."""

    def run() -> list[float]:
        pair, errors = Pair(param_memory_budget="all"), []

        def check() -> None:
            pair.step()
            errors.append(pair.error())

        check()
        for net in (pair.net, pair.plain):
            with torch.no_grad():
                net[0].base.weight.mul_(0.5)
                net[1].base.bias.data.add_(0.25)
        check()
        state = {name: value + 0.125 for name, value in network()[2].base.state_dict().items()}
        for net in (pair.net, pair.plain):
            net[2].base.load_state_dict(state)
        check()
        with deepspeed.zero.GatheredParameters([pair.net[1].base.weight], modifier_rank=0), torch.no_grad():
            if rank() == 0:
                pair.net[1].base.weight.fill_(0.01)
        pair.plain[1].base.weight.fill_(0.01)
        check()
        with torch.no_grad():
            for net in (pair.net, pair.plain):
                net[0].base.weight.add_(0.5)  # is kept when it is saved
        pair.engine.save_checkpoint(str(tmp_path))
        check()
        other = Pair(param_memory_budget="all")
        other.step()  # has the old ones
        other.engine.load_checkpoint(str(tmp_path))
        other.plain.load_state_dict(pair.plain.state_dict())
        other.oracle.optimizer.load_state_dict(pair.oracle.optimizer.state_dict())
        other.steps = pair.steps - 1
        other.engine.backward(other.engine(data(2 * other.steps, rank())).square().mean())
        other.engine.backward(other.engine(data(2 * other.steps + 1, rank())).square().mean())
        other.engine.step()
        errors.append(distance(full_parameters(other.net), full_parameters(pair.plain)))
        pair.zerosync.detach()
        pair.engine.eval()
        with torch.no_grad():
            errors.append(excess(pair.engine(data(0, 0)), of_trained(pair.plain, lambda: pair.plain(data(0, 0)))))
        return errors

    for errors in run_ranks(run):
        assert max(errors) == 0.0, errors
