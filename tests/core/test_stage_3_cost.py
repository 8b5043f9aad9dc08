"""What a step costs the host, in calls, as rank 0 of W on torch's fake process group: rules H1 and H2. Never times."""

import cProfile
import pstats
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import engines
from tests.harness.ranks import run_ranks
from tests.harness.releases import since
from zerosync_strategy import attach, prepare_cpu

pytestmark = pytest.mark.off_device("the simulation is work of the host itself")

BACKWARDS, WIDTH = 4, 8


@pytest.fixture(autouse=True)
def small_pieces() -> None:
    """The pieces of a step are as large as in use."""


class Operators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def measure(world_size: int, layers: int, options: dict[str, Any] | None) -> tuple[int, int]:
    """Python calls and operators of the third step; `options` of `attach()`, or `None` for stock DeepSpeed."""
    prepare_cpu()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    config = {"gradient_accumulation_steps": BACKWARDS} if options is None else {}
    zero = {"stage3_param_persistence_threshold": 0}
    engine = engines.make_engine(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=zero, **config)
    if options is not None:
        attach(engine, **options)

    def step() -> None:
        for k in range(BACKWARDS):
            engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
            if options is None or k + 1 == BACKWARDS:
                engine.step()

    step()
    step()
    profile = cProfile.Profile()
    profile.enable()
    step()
    profile.disable()
    with Operators() as operators:
        step()
    return int(pstats.Stats(profile).total_calls), operators.count  # type: ignore[attr-defined]


def cost(world_size: int, layers: int, options: dict[str, Any] | None) -> tuple[int, int]:
    return run_ranks(measure, world_size, layers, options, world_size=1, env={"WORLD_SIZE": str(world_size)})[0]


ALL = {"param_memory_budget": "all"}
OF_STOCK = since("0.19.8", "stock costs something else")


@pytest.mark.extended(but=("held",))
@pytest.mark.parametrize("options", [{}, ALL], ids=["gathered anew", "held"])
def test_stage_3_costs_the_same_on_any_number_of_ranks(options: dict[str, Any]) -> None:
    calls, operators = cost(8, 4, options)
    many_calls, many_operators = cost(512, 4, options)
    assert many_calls <= 1.02 * calls and many_operators <= 1.02 * operators


@OF_STOCK
def test_held_parameters_cost_a_thirtieth_of_stock_and_the_same_for_each() -> None:
    few, _ = cost(8, 8, ALL)
    more, _ = cost(8, 16, ALL)
    many, _ = cost(8, 64, ALL)
    assert many - more <= 1.05 * 6 * (more - few)
    stock_few, stock_more = cost(8, 8, None)[0], cost(8, 16, None)[0]
    assert more - few <= 0.03 * (stock_more - stock_few)


@OF_STOCK
def test_what_is_not_held_costs_a_tenth_of_stock() -> None:
    few, more = cost(8, 8, {})[0], cost(8, 16, {})[0]
    stock_few, stock_more = cost(8, 8, None)[0], cost(8, 16, None)[0]
    assert more - few <= 0.09 * (stock_more - stock_few)
