"""The norms of units in a report are those of plain torch, on every rank, before the program clips or edits."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.data import noise
from tests.harness.engines import make_engine, rank, start
from tests.harness.optimizers import mixed
from tests.harness.oracle import Oracle
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach, shard_over
from zerosync_strategy.core.gradients.unit_norms import unit_of

WIDTH = 6
inputs = noise(4, WIDTH)


class Net(nn.Module):
    """A model with numbered layers, a frozen module and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.still = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, used: int = 3) -> torch.Tensor:
        x = self.still(x) * self.scale
        for layer in self.layers[:used]:
            x = x + layer(x)
        return self.head(x)


def loss_of(net: Any, k: int, of_rank: int) -> torch.Tensor:
    return net(inputs(k, of_rank)).square().mean()


def of_units(gradients: dict[str, torch.Tensor]) -> dict[str, float]:
    squares: dict[str, float] = {}
    for name, gradient in gradients.items():
        unit = unit_of(name)
        squares[unit] = squares.get(unit, 0.0) + float(gradient.double().square().sum())
    return {unit: square**0.5 for unit, square in squares.items()}


@pytest.mark.extended(but=("1-options0-zero0-AdamW", "3-options4-zero4-AdamW"))
@pytest.mark.parametrize(
    ("stage", "options", "zero", "make"),
    [
        (1, {}, {}, torch.optim.AdamW),
        (2, {"coalesce": False}, {"reduce_bucket_size": 50}, torch.optim.AdamW),
        (2, {}, {}, mixed),
        (3, {}, {"stage3_param_persistence_threshold": 0}, torch.optim.AdamW),
        (3, {"param_memory_budget": "all"}, {"sub_group_size": 50}, torch.optim.AdamW),
        (3, {}, {}, mixed),
        (3, {}, {"offload_optimizer": {"device": "cpu"}}, torch.optim.AdamW),
    ],
)
def test_norms_are_those_of_plain_torch(stage: int, options: dict[str, Any], zero: dict[str, Any], make: Any) -> None:
    def run() -> None:
        net, plain = Net(), Net()

        def optimizer(module: Net) -> Any:
            trained = [param for param in module.parameters() if param.requires_grad]
            return mixed(module) if make is mixed else make(trained, lr=1e-2)

        engine = make_engine(net, optimizer(net), stage, zero, gradient_clipping=0.05)
        oracle = Oracle(plain, optimizer(plain))
        zerosync = attach(engine, unit_norms=True, **options)
        for step in range(3):
            for k in (2 * step, 2 * step + 1):
                engine.backward(loss_of(engine, k, rank()))
                oracle.backward(lambda of_rank, k=k: loss_of(plain, k, of_rank))
            if step == 1:  # edits come later
                with zerosync.full_gradients():
                    net.head.weight.grad.mul_(2.0)
            names = {param: name for name, param in plain.named_parameters()}
            means = {
                names[param]: torch.stack(grads).mean(0)
                for param, *grads in zip(oracle.parameters, *oracle.ranks, strict=True)
                if param.requires_grad
            }
            expected = of_units(means)
            engine.step()
            report = zerosync.report
            assert report is not None and report.unit_norms.keys() == expected.keys() == {"scale", "head"} | {
                f"layers.{k}" for k in range(3)
            }
            for unit, norm in expected.items():
                assert report.unit_norms[unit] == pytest.approx(norm, rel=1e-5), (step, unit)
                assert report.numbers()[f"norm/{unit}"] == report.unit_norms[unit]
            if step == 1:
                head = next(place for place, param in enumerate(oracle.parameters) if param is plain.head.weight)
                for of_rank in oracle.ranks:
                    of_rank[head] *= 2.0
            oracle.step(clip=0.05)

    run_ranks(run)


def test_the_loss_scale_is_left_out_and_what_nobody_uses_is_zero() -> None:
    def run() -> dict[str, float]:
        engine = make_engine(net := Net(), torch.optim.SGD(net.parameters(), lr=1e-2), 2)
        zerosync = attach(engine, unit_norms=True)
        engine.optimizer.loss_scaler.cur_scale = 8.0  # as with fp16, which not every CPU has
        engine.backward(engine(inputs(0, rank()), 2).square().mean())
        engine.step()
        assert zerosync.report is not None
        return dict(zerosync.report.unit_norms)

    plain = Net()
    (sum(plain(inputs(0, of_rank), 2).square().mean() for of_rank in range(2)) / 2).backward()
    expected = of_units({n: p.grad for n, p in plain.named_parameters() if p.grad is not None})
    for found in run_ranks(run):
        assert found == {unit: pytest.approx(expected.get(unit, 0.0), rel=1e-5) for unit in found}
        assert found["layers.2"] == 0.0 < found["layers.1"]


def test_without_the_option_there_are_none() -> None:
    def run() -> int:
        engine = make_engine(net := Net(), torch.optim.SGD(net.parameters(), lr=1e-2), 2)
        zerosync = attach(engine)
        engine.backward(loss_of(engine, 0, rank()))
        engine.step()
        assert zerosync.report is not None
        return len(zerosync.report.unit_norms)

    assert run_ranks(run) == [0, 0]


def test_shards_of_several_groups_are_an_error() -> None:
    def run() -> str:
        start()
        net = Net()
        groups = [torch.distributed.new_group([k]) for k in range(2)]
        shard_over(groups[rank()], net.layers[0])
        engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=1e-2), 3)
        with pytest.raises(ValueError, match="'unit_norms'") as error:
            attach(engine, unit_norms=True)
        return str(error.value)

    for error in run_ranks(run):
        assert "not all ranks shard each parameter" in error and error.endswith("Leave it out.")


def test_units_of_names() -> None:
    names = {
        "model.layers.3.mlp.up.weight": "model.layers.3", "layers.3.experts.7.weight": "layers.3",
        "lm_head.weight": "lm_head", "0.weight": "0", "scale": "scale",
    }  # fmt: skip
    assert {name: unit_of(name) for name in names} == names
