"""Simulated: what is held is gathered where it lies, or through two buffers, and no stream uses memory too early."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from tests.harness.engines import make_engine, rank, start
from tests.harness.networks import matrices
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.racecheck import Stream, simulate
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.engine.gathering import Arrival, ShardGather

LAYERS = 8


def train(width: int, frozen: bool) -> tuple[float, int, list[str]]:
    """The distance to plain torch, the most receive buffers at a time, and what the checker has found."""
    live = most = 0
    stock_begin, stock_copy_out = ShardGather.begin, Arrival.copy_out

    def begin(self: ShardGather, *args: Any) -> Any:
        nonlocal live, most
        received, wait = stock_begin(self, *args)
        live += received is not None
        most = max(most, live)
        return received, wait

    def copy_out(self: Arrival, stream: Any) -> None:
        nonlocal live
        stock_copy_out(self, stream)
        live -= self.received is not None

    with simulate() as simulation, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardGather, "begin", begin)
        patch.setattr(Arrival, "copy_out", copy_out)
        start()
        net = matrices(width, LAYERS)
        net[2].requires_grad_(not frozen)
        plain = copy.deepcopy(net)
        zero = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": width * width}
        optimizers = [torch.optim.AdamW([p for p in each.parameters() if p.requires_grad]) for each in (net, plain)]
        engine, oracle = make_engine(net, optimizers[0], 3, zero), Oracle(plain, optimizers[1])
        attach(engine, param_memory_budget="all")
        main, side = get_accelerator().current_stream(), Stream(name="side")
        for k in range(3):
            side.wait_stream(main)
            with get_accelerator().stream(side):  # a reader, whose stream neither steps nor trains
                torch.ones(width, width).mul_(2.0)
                net[0].weight.norm()
            main.wait_stream(side)
            engine.backward(engine(batch(k, rank(), width)).square().mean())
            oracle.backward(lambda of, k=k: plain(batch(k, of, width)).square().mean())
            engine.step()
            oracle.step()
            with torch.no_grad():
                engine(batch(k, rank(), width))
        return distance(full_parameters(net), full_parameters(plain)), most, list(map(str, simulation.findings))


def batch(k: int, of_rank: int, width: int) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(10 * k + of_rank))


@pytest.mark.extended(
    but=(
        "16-0-False",
        "17-2-False",
    )
)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("width", "buffers"), [(16, 0), (17, 2)])  # rows of 512 and of 580 bytes
def test_two_receive_buffers(width: int, buffers: int, frozen: bool) -> None:
    assert run_ranks(train, width, frozen) == [(0.0, buffers, [])] * 2


class ReadsAnother(nn.Module):
    """Its second forward reads another module's weight on a stream of its own, in a function of C++."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(16, 16), nn.Linear(16, 16)
        self.side, self.reads = Stream(name="side"), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reads:
            main = get_accelerator().current_stream()
            with get_accelerator().stream(self.side), torch.no_grad():
                dist._broadcast_coalesced(dist.group.WORLD, [self.other.weight], 1 << 20, 0)
            main.wait_stream(self.side)
        out: torch.Tensor = self.other(self.first(x)).square().mean()
        return out


def test_what_a_module_reads_has_its_values_in_cpp_too() -> None:
    """Its reader's stream waits at the read: past ``__torch_function__`` nothing does."""

    def run() -> list[str]:
        with simulate() as simulation:
            start()
            net = ReadsAnother()
            zero = {"overlap_comm": True, "stage3_param_persistence_threshold": 0}
            engine = make_engine(net, torch.optim.AdamW(net.parameters()), 3, zero)
            attach(engine, param_memory_budget="all")
            for _ in range(2):
                net.side.wait_stream(get_accelerator().current_stream())  # for the last step, as plain torch needs it
                for net.reads in (False, True):
                    engine.backward(engine(torch.randn(2, 16)))
                engine.step()
            # The simulation does not see how that function waits for its own collective.
            return [found for found in map(str, simulation.findings) if "all_gather" in found]

    assert run_ranks(run) == [[], []]


class UsesTheSecond(nn.Module):
    """The third layer is persistent, so that the first one's values are copied out with no gather behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for width in (17, 17, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers[1](x)
        return out.square().mean()


def test_a_step_after_a_forward_that_uses_some_of_what_is_held() -> None:
    """No stream but that of gathers has waited for the others' values, and the step frees them."""

    def run() -> list[str]:
        with simulate() as simulation:
            start()
            net = UsesTheSecond()
            zero = {"stage3_param_persistence_threshold": 30, "stage3_prefetch_bucket_size": 17 * 17}
            engine = make_engine(net, torch.optim.AdamW(net.parameters()), 3, zero)
            attach(engine, param_memory_budget="all")
            for _ in range(3):
                engine.backward(engine(torch.randn(4, 17)))
                engine.step()
            return list(map(str, simulation.findings))

    assert run_ranks(run) == [[], []]
