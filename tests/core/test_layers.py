"""What ZeroSync puts on live objects: layers that say whose they are, come off in order, and are shared by engines."""

import abc
import dataclasses
import types
from typing import Any, Generic, TypeVar

import deepspeed
import pytest
import torch
from torch import nn

from tests.harness.data import noise
from tests.harness.engines import make_engine, rank
from tests.harness.oracle import Oracle, backward_all, distance, full_parameters, of_trained
from tests.harness.ranks import run_ranks
from tests.harness.rounding import excess
from zerosync_strategy import attach
from zerosync_strategy.core.attached.overrides import EngineOverrides
from zerosync_strategy.core.engine.patches import interpose, restore
from zerosync_strategy.core.engine.several import parameter_tree, restrict

T = TypeVar("T")


class Stock:
    def call(self) -> str:
        return "stock"


class Inner:
    def call(self) -> str:
        return "inner " + super().call()  # type: ignore[misc]


class Outer:
    def call(self) -> str:
        return "outer " + super().call()  # type: ignore[misc]


def test_a_layer_is_named_and_only_the_outermost_comes_off() -> None:
    target = Stock()
    interpose(target, Inner)
    interpose(target, Outer)
    assert target.call() == "outer inner stock" and isinstance(target, Stock)
    assert type(target).__name__ == "ZeroSyncStock" and type(target).__module__ == Outer.__module__
    with pytest.raises(RuntimeError, match="take Inner off a ZeroSyncStock, whose outermost layer is Outer"):
        restore(target, Inner)
    restore(target, Outer)
    restore(target, Inner)
    assert type(target) is Stock
    with pytest.raises(RuntimeError, match="take Inner off a Stock"):
        restore(target, Inner)


class Mixin(abc.ABC):  # noqa: B024
    """Like Generic and Protocol, its objects have no __dict__, which a class of Python's own gets from its bases."""


class Slots:
    __slots__ = ("own",)


@dataclasses.dataclass(frozen=True)
class Frozen(Mixin, Stock):
    own: int = 1


class Registry(type):
    """A metaclass of a program."""


class Registered(metaclass=Registry):
    __slots__ = ()


@pytest.mark.parametrize(
    "bases", [(Mixin, Stock), (Generic[T], Stock), (Registered, Stock), (Slots, Stock), (Stock, Slots), (Frozen,)]
)
def test_layers_go_on_classes_with_any_bases(bases: tuple[Any, ...]) -> None:
    cls = types.new_class("Program", bases)
    target = cls()
    for layer in (Inner, Outer):
        interpose(target, layer)
        assert isinstance(target, layer) and isinstance(target, cls)
    assert target.call() == "outer inner stock" and type(target).__name__ == "ZeroSyncProgram"
    layered = type(target)
    assert types.new_class("Sub", (layered,)).__mro__[1:] == layered.__mro__
    for layer in (Outer, Inner):
        restore(target, layer)
    assert type(target) is cls and target.call() == "stock"


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x))).square().mean()
        return out


data = noise(4, 8)


def test_what_engines_share_goes_with_the_last() -> None:
    def run() -> list[float]:
        module, plain, errors = Pair(), Pair(), []
        parts = [parameter_tree(module, set(layer.parameters())) for layer in (module.first, module.second)]
        engines, handles = [], []
        for model, part, layer in zip((module, parts[1]), parts, (module.first, module.second), strict=True):
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            engine = make_engine(model, optimizer, 3, {"stage3_param_persistence_threshold": 0})
            engines.append(engine)
            restrict(engine, part, engines[0])
            handles.append(attach(engine, param_memory_budget="all"))
        assert type(engines[0]).__name__ == "ZeroSyncDeepSpeedEngine" and isinstance(engines[0], EngineOverrides)
        oracles = [Oracle(plain, torch.optim.SGD(layer.parameters(), lr=0.1)) for layer in (plain.first, plain.second)]

        def step(k: int) -> None:
            engines[0].backward(engines[0](data(k, rank())))
            backward_all(oracles, lambda r: plain(data(k, r)))
            for engine, oracle in zip(engines, oracles, strict=True):
                engine.step()
                oracle.step()
            errors.append(distance(full_parameters(module), full_parameters(plain)))

        step(0)
        handles[0].detach()
        # The second still holds, orders and unshards; the first is DeepSpeed's again.
        assert "_zerosync_parameters" in vars(engines[0]) and not engines[0].optimizer.parameter_offload.forward_hooks
        assert type(engines[0]) is deepspeed.DeepSpeedEngine and type(module.first) is not nn.Linear
        step(1)
        handles[1].detach()
        assert type(module.first) is nn.Linear
        assert "_zerosync_parameters" not in vars(engines[0])
        with torch.no_grad():  # stock gathers and releases as it did
            errors.append(excess(engines[0](data(2, 0)), of_trained(plain, lambda: plain(data(2, 0)))))
        return errors

    for errors in run_ranks(run):
        assert errors == [0.0] * 3
