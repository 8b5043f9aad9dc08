"""`module.zero_grad()` means what it means in plain torch, or is an error (N1)."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.data import noise
from tests.harness.engines import make_engine, rank
from tests.harness.networks import stack
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach

WIDTH, LAYERS = 8, 3
SHARDED = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 2 * WIDTH * WIDTH}

data = noise(4, WIDTH)


class Wrapper(nn.Module):
    """As a framework's, which the program holds in the model's place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.5)


@pytest.mark.extended(
    but=(
        "1-options0-False",
        "3-options3-False",
    )
)
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("stage", "options"), [(1, {}), (2, {"coalesce": False}), (3, {}), (3, {"coalesce": False})]
)  # fmt: skip
def test_all_of_a_model(stage: int, options: dict[str, Any], wrapped: bool) -> None:
    """Between two backwards, after the announced last one, and after a reduction."""

    def run() -> float:
        net, plain = stack(WIDTH, LAYERS), stack(WIDTH, LAYERS)
        engine, oracle = make_engine(net, sgd(net), stage, SHARDED if stage == 3 else {}), Oracle(plain, sgd(plain))
        zerosync = attach(engine, **options)
        module = Wrapper(engine) if wrapped else net
        for step in range(3):
            for k in range(3):
                if step == 1 and k == 0:
                    zerosync.window.expect_last()
                engine.backward(engine(data(3 * step + k, rank())).square().mean())
                oracle.backward(lambda r, k=3 * step + k: plain(data(k, r)).square().mean())
                if k == 0:
                    if step == 2:
                        zerosync.reduce()
                    module.zero_grad()
                    oracle.zero_grad()
            engine.step()
            oracle.step()
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", [2, 3])
def test_a_part_of_a_model(stage: int) -> None:
    """Exact while gradients are on their parameters; where they are not, an error, and nothing is dropped silently."""

    def run() -> float:
        net, plain = stack(WIDTH, LAYERS), stack(WIDTH, LAYERS)
        engine, oracle = make_engine(net, sgd(net), stage, SHARDED if stage == 3 else {}), Oracle(plain, sgd(plain))
        zerosync, part = attach(engine), {id(param) for param in plain[0].parameters()}
        zerosync.window.expect_last(False)
        for k in range(2):
            engine.backward(engine(data(k, rank())).square().mean())
            oracle.backward(lambda r, k=k: plain(data(k, r)).square().mean())
            if k == 0:
                net[0].zero_grad()
                for of_rank in oracle.ranks:
                    of_rank[:] = [None if id(p) in part else g for p, g in zip(oracle.parameters, of_rank, strict=True)]
        engine.step()
        oracle.step()
        zerosync.window.expect_last()
        engine.backward(engine(data(2, rank())).square().mean())
        with pytest.raises(RuntimeError, match=r"module.zero_grad\(\) was called for some of the parameters"):
            net[0].zero_grad()
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]
