"""A wrapper that passes attributes on to a module inside of it, as PEFT's ``modules_to_save`` does."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.engines import make_engine, rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach


class Wrapper(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inside, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x).tanh()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Wrapper(nn.Linear(8, 8)), Wrapper(nn.Linear(8, 8)), nn.Linear(8, 1))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def batch(step: int, of_rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + of_rank))


@pytest.mark.extended(but=("the module inside",))
@pytest.mark.parametrize("made_for", ["itself", "the module inside"])
def test_it_trains_as_plain_torch(made_for: str) -> None:
    """Also where DeepSpeed, as 0.18.4, has taken the inner module's autograd functions for the wrapper's own."""

    def train() -> Any:
        net = model()
        engine = make_engine(net, sgd(net), zero={"stage3_param_persistence_threshold": 0})
        if made_for == "the module inside":
            for wrapper in net[:2]:
                for name in ("pre_bwd_fn", "post_bwd_fn"):
                    vars(wrapper).pop(name, None)
                    assert getattr(wrapper, name) is vars(wrapper.inside)[name]
        attach(engine)
        for step in range(3):
            for micro in range(2):
                engine.backward(engine(batch(2 * step + micro, rank())).sum() / 2)
            engine.step()
        return full_parameters(net)

    plain = Oracle(net := model(), sgd(net))
    for step in range(3):
        for micro in range(2):
            plain.backward(lambda of, at=2 * step + micro: plain.module(batch(at, of)).sum() / 2)
        plain.step()
    for trained in run_ranks(train):
        assert distance(trained, full_parameters(plain.module)) == 0.0
