"""Parameters that a program changes outside of the optimizer (N1), against plain torch."""

import re
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from tests.harness.data import noise
from tests.harness.engines import make_engine, rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach

LAYERS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def clamp(net: Any) -> None:
    for param in net.parameters():
        param.data.clamp_(-0.1, 0.1)


def rescale(net: Any) -> None:
    with torch.no_grad():
        net.layers[0].weight.mul_(0.5)


def replace(net: Any) -> None:
    net.layers[1].weight.data = net.layers[1].weight.data.clamp(-0.1, 0.1).clone()


def load(net: Any) -> None:
    net.layers[2].load_state_dict(nn.Linear(6, 6).state_dict())


def reset(net: Any) -> None:
    net.layers[0].reset_parameters()


EDITS: list[Callable[[Any], None]] = [clamp, rescale, replace, load, reset]


def engine_of(net: nn.Module, stage: int, zero: dict[str, Any] | None = None, **config: Any) -> Any:
    return make_engine(net, torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9), stage, zero, **config)


data = noise(4, 6)


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.extended(
    but=(
        "2, offloaded",
        "3",
    )
)
@pytest.mark.parametrize(
    ("stage", "zero", "options"),
    [
        (1, {}, {}),
        (2, {}, {}),
        (2, OFFLOAD, {}),
        (3, {}, {}),  # all parameters are persistent
        (3, OFFLOAD, {}),
        (3, {"stage3_param_persistence_threshold": 0}, {"param_memory_budget": "all"}),
    ],
    ids=["1", "2", "2, offloaded", "3", "3, offloaded", "3, held"],
)
def test_an_edit_lasts(stage: int, zero: dict[str, Any], options: dict[str, Any]) -> None:
    """Each edit before a step, between a backward and its step, as in plain torch."""

    def run() -> dict[str, float]:
        errors = {}
        for edit in EDITS:
            net, plain = Net(), Net()
            oracle = Oracle(plain, torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9))
            engine = engine_of(net, stage, zero)
            attach(engine, **options)
            for k in range(3):
                engine.backward(engine(data(k, rank())))
                oracle.backward(lambda r, k=k, plain=plain: plain(data(k, r)))
                if k == 1:
                    for module in (net, plain):
                        torch.manual_seed(1)
                        edit(module)
                engine.step()
                oracle.step()
            errors[edit.__name__] = distance(full_parameters(net), full_parameters(plain))
            engine.destroy()
        return errors

    for errors in run_ranks(run):
        assert errors == dict.fromkeys(errors, 0.0)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_edit_of_parameters_in_bf16_reaches_the_master_weights(stage: int) -> None:
    def run() -> tuple[bool, bool]:
        net = Net()
        engine = engine_of(net, stage, bf16={"enabled": True})
        attach(engine)

        def step() -> None:
            engine.backward(engine(data(0, rank()).bfloat16()).float())
            engine.step()

        step()
        masters = [p for group in engine.optimizer.optimizer.param_groups for p in group["params"]]
        before = [master.detach().clone() for master in masters]
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        step()
        # What nobody has edited keeps all bits of its master weights.
        kept = all(torch.equal(master, old) for master, old in zip(masters, before, strict=True))
        net.layers[0].weight.data.fill_(0.5)
        step()
        return kept, bool((full_parameters(net)["layers.0.weight"] == 0.5).all())

    assert run_ranks(run) == [(True, True)] * 2


@pytest.mark.extended(but=("fp32",))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_edit_of_gathered_parameters(dtype: str) -> None:
    """In DeepSpeed's own context: partitioned again, they are what its `modifier_rank` has made of them."""

    def run() -> bool:
        net = Net()
        bf16 = {"enabled": dtype == "bf16"}
        engine = engine_of(net, 3, {"stage3_param_persistence_threshold": 0}, bf16=bf16)
        attach(engine)
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        with deepspeed.zero.GatheredParameters([net.layers[1].weight], modifier_rank=0):
            if rank() == 0:
                net.layers[1].weight.data.fill_(0.25)
        engine.backward(engine(data(0, rank()).to(net.layers[0].weight.dtype)).float())
        engine.step()
        return bool((full_parameters(net)["layers.1.weight"] == 0.25).all())

    assert all(run_ranks(run))


@pytest.mark.parametrize(("stage", "shape", "in_place"), [(2, (3,), False), (2, (2, 3), True), (3, (3,), False)])
def test_data_of_another_shape_is_an_error(stage: int, shape: tuple[int, ...], in_place: bool) -> None:
    def run() -> None:
        engine = engine_of(Net(), stage)
        attach(engine)
        for last in (False, True):
            engine.backward(engine(data(0, rank())))
            if last:
                bias = engine.module.layers[1].bias
                bias.data = bias.data.view(shape) if in_place else torch.zeros(shape)
                found = rf"'layers.1.bias' has the shape {re.escape(str(shape))}, where .* built with \(6,\)"
                with pytest.raises(ValueError, match=found):
                    engine.step()
            else:
                engine.step()

    run_ranks(run)
