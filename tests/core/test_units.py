"""Units: modules that ZeRO-3 gathers as a whole. Which are chosen, and that any program trains as in plain torch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.harness.engines import attached_of, make_engine, rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.engine.unit_hooks import is_unit

SHARDED = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
WIDTH = 8


class Block(nn.Module):
    """With a parameter of its own beside those of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.norm, self.wide = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)
        self.inner: Callable[..., Any] = lambda function, x: function(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(self.inner(self.wide, self.norm(x)).tanh()) * self.scale


class Net(nn.Module):
    """Blocks that share a parameter, that run twice, in another order, in parts or not at all; one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.blocks[1].wide.weight = self.blocks[0].wide.weight
        self.blocks[2].requires_grad_(False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.outer: Callable[..., Any] = lambda function, x: function(x)

    def forward(self, words: torch.Tensor, order: tuple[int, ...], in_parts: bool) -> torch.Tensor:
        x = self.words(words) + self.bias
        for index in order:
            x = self.outer(self.blocks[index], x)
        if in_parts:
            block = self.blocks[3]
            x = block.narrow(block.wide(x).tanh()) * self.blocks[0].scale
        return (x - 1.0).square().mean()


PROGRAM = [((0, 1, 2, 3), False), ((3, 1, 1, 0), False), ((0, 2, 4), True), ((0, 1, 2, 3), False)]


def words(step: int, of_rank: int) -> torch.Tensor:
    return torch.randint(5, (4,), generator=torch.Generator().manual_seed(10 * step + of_rank))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in net.parameters() if param.requires_grad], lr=0.3, momentum=0.9)


def recompute(reentrant: bool) -> Callable[..., Any]:
    return lambda function, x: checkpoint(function, x, use_reentrant=reentrant)


PLACES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sharded": ({}, {}),
    "held": ({}, {"param_memory_budget": "all"}),
    "held in part": ({}, {"param_memory_budget": 800}),
    "on the host": ({}, {"param_memory_budget": {"device": 0, "host": "all"}}),
    "offloaded": ({"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}, {}),
    "persistent": ({"stage3_param_persistence_threshold": 2 * WIDTH}, {}),
    "not coalesced": ({}, {"coalesce": False}),
}
CHECKPOINTS: dict[str, tuple[Callable[..., Any] | None, Callable[..., Any] | None]] = {
    "nothing": (None, None),
    "blocks": (recompute(False), None),
    "blocks, reentrant": (recompute(True), None),
    "parts of blocks": (None, recompute(False)),
    "both": (recompute(False), recompute(False)),
}
CASES = [*((place, "nothing") for place in PLACES), *(("sharded", recomputed) for recomputed in list(CHECKPOINTS)[1:])]


@pytest.mark.extended(but=("sharded-nothing", "held in part-nothing", "sharded-both"))
@pytest.mark.parametrize(("place", "recomputed"), CASES)
def test_any_program_is_that_of_plain_torch(place: str, recomputed: str) -> None:
    zero, options = PLACES[place]
    outer, inner = CHECKPOINTS[recomputed]

    def run() -> tuple[float, list[str]]:
        net, plain = Net(), Net()
        for each in (net, plain):
            each.outer = outer or each.outer
            for block in each.blocks:
                block.inner = inner or block.inner
        oracle = Oracle(plain, sgd(plain))
        engine = make_engine(net, sgd(net), 3, SHARDED | zero)
        zerosync = attach(engine, **options)
        assert [is_unit(module) for module in net.modules()].count(True) == 5
        for step, how in enumerate(PROGRAM):
            for _ in range(2):
                engine.backward(engine(words(step, rank()), *how))
                oracle.backward(lambda r, step=step, how=how: plain(words(step, r), *how))
            if step == 1:
                with torch.no_grad():
                    assert abs(float(engine(words(9, 0), *how)) - float(plain(words(9, 0), *how))) < 1e-5
            engine.step()
            oracle.step()
        left = [name for name, param in net.named_parameters() if param.ds_status.name == "AVAILABLE"]
        error = distance(full_parameters(net), full_parameters(plain))
        zerosync.detach()
        assert not any(is_unit(module) for module in net.modules())
        if recomputed != "blocks, reentrant":  # where stock reduces what two blocks share twice, and fails
            engine.backward(engine(words(8, rank()), *PROGRAM[0]))
            engine.step()
        engine.destroy()
        return error, [] if zero.get("stage3_param_persistence_threshold") or options else left

    assert run_ranks(run) == [(0.0, [])] * 2


def test_a_unit_is_one_message() -> None:
    """Also where DeepSpeed gathers ahead fewer elements than a unit has."""

    def run() -> list[int]:
        calls = []
        for ahead, options in ((0, {}), (50, {}), (0, {"eager_frames": False})):  # the last has no units by itself
            engine = make_engine(net := Net(), sgd(net), 3, SHARDED | {"stage3_prefetch_bucket_size": ahead})
            zerosync = attach(engine, **options)
            for step in range(4):
                engine.backward(engine(words(step, rank()), (0, 3, 4), False))
                engine.step()
            calls.append(zerosync.report.collectives["isend"].calls)
            engine.destroy()
        return calls

    for calls in run_ranks(run):
        assert calls == [6, 5, 15]


class Says(Net):
    _no_split_modules = ("Block", "Other")


def named(net: nn.Module, options: dict[str, Any], zero: dict[str, Any]) -> list[str]:
    engine = make_engine(net, sgd(net), 3, SHARDED | zero)
    parameters = attached_of(attach(engine, **options))._parameters
    assert sum(parameters.units.counts.values()) == sum(map(is_unit, net.modules()))
    found = [name for name, module in net.named_modules() if is_unit(module)]
    engine.destroy()
    return found


def test_which_modules_are_units() -> None:
    def run() -> None:
        blocks = [f"blocks.{index}" for index in range(5)]
        assert named(Net(), {}, {}) == blocks
        assert named(Says(), {}, {}) == blocks
        assert named(nn.Sequential(Net(), nn.Linear(2, 2)), {"unit_modules": ["Net"]}, {}) == ["0"]
        assert named(Net(), {}, {"stage3_max_live_parameters": 500}) == []  # the layers of a block are alone
        nested = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
        inner = ["0.0", "0.1", "1.0", "1.1"]
        assert named(copy.deepcopy(nested), {}, {}) == inner
        assert named(copy.deepcopy(nested), {}, {"stage3_prefetch_bucket_size": 1000}) == ["0", "1"]
        small = {"stage3_prefetch_bucket_size": 1000, "stage3_max_live_parameters": 800}
        assert named(copy.deepcopy(nested), {}, small) == inner
        assert named(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {}, {}) == []
        set_z3_leaf_modules(net := Net(), [nn.Embedding])
        assert named(net, {"unit_modules": ("Block",)}, {}) == ["words", *blocks]
        assert named(Net(), {"eager_frames": False}, {}) == named(Net(), {"unit_modules": ["Linear"]}, {}) == []
        engine = make_engine(net := Net(), sgd(net), 3, SHARDED)
        with pytest.raises(ValueError, match=r"'unit_modules' got 'Blok', and the Net has no .* Block, Embedding"):
            attach(engine, unit_modules=["Blok"])
        engine.destroy()
        with pytest.raises(ValueError, match="'unit_modules' says what ZeRO stage 3 gathers as a whole, found stage 2"):
            attach(make_engine(net := Net(), sgd(net), 2), unit_modules=["Block"])

    run_ranks(run)
