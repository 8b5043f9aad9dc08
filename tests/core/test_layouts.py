"""Shapes and memory layouts of parameters that are legal in torch: tiny and empty ones, strided ones, shared memory."""

from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from tests.harness.engines import configuration, make_engine, rank, start
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach

STAGE_3 = [{}, {"param_memory_budget": "all"}, {"param_memory_budget": 20}]
SHARDED = {"stage3_param_persistence_threshold": 0}


class Tiny(nn.Module):
    """Parameters of no elements, of none to more than one per rank, and of other shapes with as many."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        shapes: list[tuple[int, ...]] = [(), (0,), (1, 1), (0, 3), (1, world_size), (world_size, 1), (2, 0)]
        shapes += [(size,) for size in range(1, world_size + 2)]
        generator = torch.Generator().manual_seed(0)
        self.each = nn.ParameterList(nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes)
        self.narrow, self.wide = nn.Linear(2, 0), nn.Linear(0, 2, bias=False)
        self.table = nn.Embedding(0, 3)  # read from here

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.table.weight.shape == (0, 3)
        nothing = self.wide(self.narrow(x)) + self.table.weight.sum()
        return sum((x * each.square().sum() for each in self.each), nothing).square().mean()  # type: ignore[union-attr]


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)


@pytest.mark.extended(but=("2-2", "3-2"))
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tiny_parameters(stage: int, world_size: int) -> None:
    """Trained, changed in full by all ranks, and by rank 0 for all."""

    def change(net: nn.Module, by: float) -> None:
        with torch.no_grad():
            for param in net.parameters():
                param.mul_(by)

    def run() -> dict[str, float]:
        plain = Tiny(world_size)
        oracle, found = Oracle(plain, sgd(plain), world_size), {}
        for k in range(4):
            oracle.backward(lambda r, k=k: plain(torch.tensor([1.0 + k, r])))
            oracle.step()
            change(plain, 0.9 if k % 2 else 1.1)
        cases = [(options, zero) for options in STAGE_3 for zero in (SHARDED, {})] if stage == 3 else [({}, {})]
        for options, zero in cases:
            net = Tiny(world_size)
            engine = make_engine(net, sgd(net), stage, zero)
            zerosync = attach(engine, **options)
            for k in range(4):
                engine.backward(engine(torch.tensor([1.0 + k, rank()])))
                engine.step()
                if k % 2 or stage < 3:
                    with zerosync.full_parameters():
                        change(net, 0.9 if k % 2 else 1.1)
                else:
                    with deepspeed.zero.GatheredParameters(list(net.parameters()), modifier_rank=0):
                        change(net, 1.1 if rank() == 0 else 7.0)
            shapes = [param.shape for param in net.parameters()]
            assert shapes == [param.shape for param in plain.parameters()], shapes
            found[f"{options} {zero}"] = distance(full_parameters(net), full_parameters(plain))
            engine.destroy()
        return found

    for found in run_ranks(run, world_size=world_size):
        assert max(found.values()) == 0.0, found


class Strided(nn.Module):
    """Parameters whose last dimension has steps, and buffers cut into parameters that share none of their elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.turned = nn.Parameter(torch.randn(5, 3).t())
        self.swapped = nn.Parameter(torch.randn(3, 2, 2).transpose(0, 1))
        flat, columns = torch.randn(10), torch.randn(3, 4)
        self.low, self.high = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
        self.left, self.right = nn.Parameter(columns[:, :2]), nn.Parameter(columns[:, 2:])
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.frozen_too = nn.Parameter(self.frozen.data, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).mean((2, 3)) @ self.turned
        others = [self.swapped, self.low, self.high, self.left, self.right]
        return (y + sum((other.square().sum() for other in others), (self.frozen_too * self.frozen).sum())).mean()


def images(k: int, of_rank: int) -> torch.Tensor:
    x = torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(10 * k + of_rank))
    return x.to(memory_format=torch.channels_last)


@pytest.mark.extended(but=("2-zero1", "3-zero3", "3-zero.Init"))
@pytest.mark.parametrize(("stage", "zero"), [(1, {}), (2, {}), (3, {}), (3, SHARDED), (3, "zero.Init")])
def test_layouts_of_torch(stage: int, zero: Any) -> None:
    """They are contiguous here, which changes no value but in how convolutions round."""

    def run() -> float:
        plain = Strided()
        oracle = Oracle(plain, sgd(plain))
        start()
        with deepspeed.zero.Init(enabled=zero == "zero.Init", config_dict_or_path=configuration(3)):
            net = Strided()
        engine = make_engine(net, sgd(net), stage, SHARDED if zero == "zero.Init" else zero)
        attach(engine, **({"param_memory_budget": "all"} if stage == 3 else {}))
        for k in range(4):
            engine.backward(engine(images(k, rank())))
            oracle.backward(lambda r, k=k: plain(images(k, r)))
            if k % 2:
                engine.step()
                oracle.step()
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]


class Sharing(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.own, self.own_too = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        weight, flat = self.first.weight.data, torch.randn(24)
        if kind == "data":
            self.second.weight.data = weight
        elif kind == "transposed":
            self.second.weight.data = weight.t()
        elif kind == "part of a buffer":
            self.first.weight.data, self.second.weight.data = flat[:16].view(4, 4), flat[8:].view(4, 4)
        elif kind == "frozen":
            self.second.weight = nn.Parameter(weight, requires_grad=False)
        elif kind == "own":
            self.own_too.data = self.own.data.t()
        elif kind == "buffer":
            del self.second.weight
            self.second.register_buffer("weight", weight.view(16))
        elif kind == "expanded":
            self.second.weight = nn.Parameter(torch.randn(1, 4).expand(4, 4))


FIRST_AND_SECOND = r"'first\.weight' and 'second\.weight'"
SHARING = {
    **dict.fromkeys(("data", "transposed", "part of a buffer", "frozen", "buffer"), FIRST_AND_SECOND),
    "own": "'own' and 'own_too'",
    "expanded": r"'second\.weight' with itself",
}
SHARDED_BY_THEN = {"part of a buffer", "frozen", "buffer", "expanded"}  # and were no parameters of ZeRO-3's after it


@pytest.mark.extended(but=("2-config1", "3-zero.Init"))
@pytest.mark.parametrize(("stage", "config"), [(1, {}), (2, {"bf16": {"enabled": True}}), (3, {}), (3, "zero.Init")])
def test_memory_that_parameters_share_is_named(stage: int, config: Any) -> None:
    """In plain torch, what is written to one is in the other."""

    def run() -> None:
        start()
        for kind, named in SHARING.items():
            if config == "zero.Init" and kind in SHARDED_BY_THEN:
                continue
            with deepspeed.zero.Init(enabled=config == "zero.Init", config_dict_or_path=configuration(3)):
                net = Sharing(kind)
            engine = make_engine(net, sgd(net), stage, **({} if config == "zero.Init" else config))
            with pytest.raises(ValueError, match=rf"share memory: {named}\. ZeRO gives each .*'b\.weight = a\.weight'"):
                attach(engine)
        net = Sharing("")
        attach(make_engine(net, sgd(net), stage, **({} if config == "zero.Init" else config)))

    run_ranks(run)
