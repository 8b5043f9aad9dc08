"""Running statistics of BatchNorm: as under DistributedDataParallel, all ranks have those of the first rank (N1)."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.harness.engines import make_engine, rank
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach

STEPS = 3


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
        self.of_this_rank += rank() + 1
        return self.net(x).square().mean()


def batch(step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank())
    return (1 + rank()) * torch.randn(4, 2, 9, generator=generator) + rank()


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.named_buffers() if "of_this_rank" not in name}


@pytest.mark.parametrize(("stage", "micro_batches"), [(1, 1), (2, 2), (3, 2)])
def test_all_ranks_evaluate_with_the_statistics_of_the_first(stage: int, micro_batches: int) -> None:
    def train(model: Any, backward: Any, step: Any) -> None:
        for number in range(STEPS):
            for micro in range(micro_batches):
                backward(model(batch(number, micro)) / micro_batches)
            step()
        model.eval()

    def run() -> tuple[float, float, dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
        net = Net()
        engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=0.1), stage)
        zerosync = attach(engine)
        train(engine, engine.backward, engine.step)
        ours = float(engine(batch(9, 0)))
        assert zerosync.report is not None and zerosync.report.apart.keys() == {"running statistics"}

        plain = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        train(plain, lambda loss: loss.backward(), step)
        theirs = float(plain(batch(9, 0)))  # which takes the buffers of the first rank
        return ours, theirs, state_of(net), state_of(plain.module), float(net.of_this_rank)

    results = run_ranks(run)
    for ours, theirs, buffers, of_ddp, _ in results:
        assert ours == pytest.approx(theirs, rel=1e-4)
        for name, value in buffers.items():
            torch.testing.assert_close(value, of_ddp[name], rtol=1e-4, atol=1e-6)
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
