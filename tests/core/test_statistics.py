"""Running statistics of BatchNorm: as under DistributedDataParallel, all ranks have those of the first rank (N1)."""

import os

import pytest
import torch
from torch import nn

from tests.harness.engines import make_engine, rank
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach

STEPS, WORLD = 3, 2


class Net(nn.Module):
    """With layers of both kinds, and one without statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True), nn.InstanceNorm1d(4),
            nn.Conv1d(4, 3, 3), nn.BatchNorm1d(3, affine=False),
        )  # fmt: skip
        self.register_buffer("of_this_rank", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.of_this_rank += int(os.environ.get("RANK", 0)) + 1
        return self.net(x).square().mean()


def batch(step: int, micro: int, of_rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + of_rank)
    return (1 + of_rank) * torch.randn(4, 2, 9, generator=generator) + of_rank


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.named_buffers() if "of_this_rank" not in name}


def expected(micro_batches: int) -> nn.Module:
    """The first of two replicas in one process, which is that of every rank under DistributedDataParallel."""
    replicas = [Net() for _ in range(WORLD)]
    optimizers = [torch.optim.SGD(replica.parameters(), lr=0.1) for replica in replicas]
    for number in range(STEPS):
        for micro in range(micro_batches):
            for of_rank, replica in enumerate(replicas):
                (replica(batch(number, micro, of_rank)) / micro_batches).backward()
        for params in zip(*(replica.parameters() for replica in replicas), strict=True):
            mean = sum(param.grad for param in params) / WORLD
            for param in params:
                param.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for replica in replicas[1:]:
            replica.load_state_dict(replicas[0].state_dict())
    return replicas[0].eval()


@pytest.mark.parametrize(("stage", "micro_batches"), [(1, 1), (2, 2), (3, 2)])
def test_all_ranks_evaluate_with_the_statistics_of_the_first(stage: int, micro_batches: int) -> None:
    def run() -> tuple[float, dict[str, torch.Tensor], float]:
        net = Net()
        engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=0.1), stage)
        zerosync = attach(engine)
        for number in range(STEPS):
            for micro in range(micro_batches):
                engine.backward(engine(batch(number, micro, rank()).to(engine.device)) / micro_batches)
            engine.step()
        engine.eval()
        evaluated = engine(batch(9, 0, 0).to(engine.device)).item()
        assert zerosync.report is not None and zerosync.report.apart.keys() == {"running statistics"}
        return evaluated, state_of(net), float(net.of_this_rank)

    plain = expected(micro_batches)
    results = run_ranks(run)
    for evaluated, buffers, _ in results:
        assert evaluated == pytest.approx(plain(batch(9, 0, 0)).item(), rel=1e-4)
        for name, value in state_of(plain).items():
            torch.testing.assert_close(buffers[name], value, rtol=1e-4, atol=1e-6)
    assert results[0][-1] != results[1][-1], "a buffer of the program's own is its own"


def test_statistics_of_experts_are_those_of_their_own_ranks() -> None:
    def run() -> bool:
        net = Net()
        engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=0.1), 3)
        for param in net.net[1].parameters():
            param.allreduce = False  # type: ignore[attr-defined]  # as deepspeed.moe.layer.Experts marks them
        layers = attach(engine)._attached.parts.statistics._layers
        return net.net[1] not in layers and net.net[5] in layers

    assert run_ranks(run) == [True] * 2
