"""Shapes and memory layouts of parameters that are legal in torch: tiny and empty ones, strided ones, shared memory."""

import deepspeed
import pytest
import torch
from torch import nn

from tests.harness.engines import make_engine, rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach

STAGE_3 = [{}, {"param_memory_budget": "all"}, {"param_memory_budget": 20, "eager_frames": False}]
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
            assert shapes == [param.shape for param in plain.parameters()] or "eager_frames" in options, shapes
            found[f"{options} {zero}"] = distance(full_parameters(net), full_parameters(plain))
            engine.destroy()
        return found

    for found in run_ranks(run, world_size=world_size):
        assert max(found.values()) < 1e-6, found
