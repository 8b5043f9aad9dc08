"""The same windows on CUDA: one rank with NCCL, as many as there are GPUs. Run with ZEROSYNC_TEST_CUDA=1."""

import os
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from tests.harness.engines import make_engine
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach

BACKWARDS = 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def loss_of(module: Any, k: int, rank: int, device: Any) -> torch.Tensor:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * k + rank)).to(device)
    return (module(x) - x).square().mean() / BACKWARDS


def train(stage: int, options: dict[str, Any], zero: dict[str, Any]) -> Any:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    deepspeed.init_distributed("nccl")
    net = model().cuda()
    engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=0.1), stage, zero)
    zerosync = attach(engine, **options)
    plain = model().cuda()
    oracle = Oracle(plain, torch.optim.SGD(plain.parameters(), lr=0.1), world)
    for k in range(4 * BACKWARDS):
        if k % BACKWARDS == BACKWARDS - 1:
            zerosync.window.expect_last()
        engine.backward(loss_of(engine, k, rank, "cuda"))
        oracle.backward(lambda r, k=k: loss_of(plain, k, r, "cuda"))
        if k % BACKWARDS == BACKWARDS - 1:
            engine.step()
            oracle.step()
    return distance(full_parameters(net), full_parameters(plain)), zerosync.report


@pytest.mark.gpu
@pytest.mark.parametrize("zero", [{"overlap_comm": True}, {"overlap_comm": False}])
@pytest.mark.parametrize("options", [{}, {"overlap_last": False}, {"reduction": "ordered"}, {"grad_memory_budget": 0}])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_equal_to_plain_torch(stage: int, options: dict[str, Any], zero: dict[str, Any]) -> None:
    for error, report in run_ranks(train, stage, options, zero, world_size=torch.cuda.device_count()):
        assert error < 1e-5
        assert report.backwards == BACKWARDS


class ReadsElsewhere(nn.Module):
    """A tied weight and one of a layer that never runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.other, self.last = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.linear(nn.functional.gelu(self.first(x)), self.other.weight))


def start(compile_config: dict[str, Any], stage: int = 3, kind: type[nn.Module] = ReadsElsewhere) -> Any:
    torch.cuda.set_device(int(os.environ["RANK"]))
    deepspeed.init_distributed("nccl")
    net = kind().cuda()
    optimizer, zero = torch.optim.SGD(net.parameters(), lr=0.1), {"stage3_param_persistence_threshold": 0}
    return make_engine(net, optimizer, stage, zero, compile=compile_config)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equal_to_plain_torch(backend: str) -> None:
    def run() -> float:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        engine = start({})
        attach(engine)
        engine.compile(backend=backend)
        plain = ReadsElsewhere().cuda()
        oracle = Oracle(plain, torch.optim.SGD(plain.parameters(), lr=0.1), world)
        for k in range(6):
            engine.backward(loss_of(engine, k, rank, "cuda"))
            engine.step()
            oracle.backward(lambda r, k=k: loss_of(plain, k, r, "cuda"))
            oracle.step()
        return distance(full_parameters(engine.module), full_parameters(plain))

    assert max(run_ranks(run, world_size=torch.cuda.device_count(), timeout=280)) < 1e-4


class Breaks(ReadsElsewhere):
    """What DeepCompile has no graph for."""

    @torch._dynamo.disable
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.gelu(self.between(nn.functional.gelu(self.first(x)))))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("kind", [ReadsElsewhere, Breaks])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepcompile_equal_to_plain_torch(stage: int, kind: type[nn.Module], backend: str) -> None:
    def run() -> tuple[float, Any]:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        engine = start({"deepcompile": True}, stage, kind)
        zerosync = attach(engine)
        engine.compile(backend=backend)
        plain = kind().cuda()
        oracle = Oracle(plain, torch.optim.SGD(plain.parameters(), lr=0.1), world)
        for k in range(7 * BACKWARDS):  # its default schedule begins its second part at the sixth step
            engine.backward(loss_of(engine, k, rank, "cuda"))
            oracle.backward(lambda r, k=k: loss_of(plain, k, r, "cuda"))
            if k % BACKWARDS == BACKWARDS - 1:
                engine.step()
                oracle.step()
        return distance(full_parameters(engine.module), full_parameters(plain)), zerosync.report

    for error, report in run_ranks(run, world_size=torch.cuda.device_count(), timeout=280):
        assert error < 1e-4
        assert report.reductions == 1
