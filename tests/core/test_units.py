"""Units: modules that ZeRO-3 gathers as a whole. Which are chosen, and that any program trains as in plain torch."""

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.harness.engines import attached_of, make_engine, rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.engine import gathering
from zerosync_strategy.core.params import unit_order
from zerosync_strategy.tools.plan.measures import ProcessCounter

SHARDED = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
LEAVES = {"stage3_max_reuse_distance": 0}  # nothing stays for what comes next
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


def step(engine: Any, oracle: Oracle, k: int) -> None:
    """Step ``k`` of both, by the first four blocks in their order."""
    engine.backward(engine(words(k, rank()), (0, 1, 2, 3), False))
    engine.step()
    oracle.backward(lambda of_rank: oracle.module(words(k, of_rank), (0, 1, 2, 3), False))
    oracle.step()


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


@pytest.mark.extended(but=("sharded-nothing",))
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
        assert attached_of(zerosync).stage.units.counts.total() == 5
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
        assert engine.optimizer.parameter_offload.forward_hooks
        if recomputed != "blocks, reentrant":  # where stock reduces what two blocks share twice, and fails
            engine.backward(engine(words(8, rank()), *PROGRAM[0]))
            engine.step()
        engine.destroy()
        return error, [] if zero.get("stage3_param_persistence_threshold") or options else left

    assert run_ranks(run) == [(0.0, [])] * 2


@pytest.mark.off_device("it counts messages of gloo")
def test_a_unit_is_one_message() -> None:
    """Where units are gathered ahead, the next by itself; "Linear" is none, so that layers are alone."""

    def run() -> list[int]:
        calls = []
        for ahead, options in ((0, {}), (50, {}), (0, {"unit_modules": ["Linear"]})):
            engine = make_engine(net := Net(), sgd(net), 3, SHARDED | {"stage3_prefetch_bucket_size": ahead})
            zerosync = attach(engine, **options)
            for step in range(4):
                engine.backward(engine(words(step, rank()), (0, 3, 4), False))
                engine.step()
            calls.append(zerosync.report.collectives["isend"].calls)
            engine.destroy()
        return calls

    for calls in run_ranks(run):
        assert calls == [6, 6, 15]


def test_memory_goes_between_forward_and_backward() -> None:
    """What autograd has saved of a weight, itself or a view of it, has no bytes in between."""

    def run() -> tuple[list[int], list[list[int]]]:
        zero = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
        engine = make_engine(net := Net(), sgd(net), 3, SHARDED | zero)
        attach(engine)
        memory, in_forward, in_backward = [], [], []

        def note(module: Any, _: Any, output: torch.Tensor) -> None:
            memory.append(module.weight.t().untyped_storage())
            in_forward.append(memory[-1].nbytes())
            output.register_hook(lambda _: in_backward.append([each.nbytes() for each in memory]))

        for block in (net.blocks[0], net.blocks[3]):
            block.narrow.register_forward_hook(note)
        loss = engine(words(0, rank()), (0, 3), False)
        between = [each.nbytes() for each in memory]
        engine.backward(loss)
        after = [each.nbytes() for each in memory]
        engine.step()
        return in_forward, [between, *in_backward, after]

    for (first, last), found in run_ranks(run):  # of all that the unit has
        assert found == [[0, 0], [0, last], [first, 0], [0, 0]] and min(first, last) > 4 * 2 * WIDTH * WIDTH


def repeat_all(function: Any, x: torch.Tensor) -> Any:
    with set_checkpoint_early_stop(False):
        return checkpoint(function, x, use_reentrant=False)


@pytest.mark.extended(but=("all of blocks",))
@pytest.mark.parametrize(
    "outer", [lambda block, x: block(x), recompute(False), repeat_all, recompute(True)],
    ids=["nothing", "blocks", "all of blocks", "reentrant"],
)  # fmt: skip
def test_a_rank_has_two_units_at_most(outer: Callable[..., Any]) -> None:
    """The one that runs, and the next, on its way."""

    def run() -> list[int]:
        net = nn.Sequential(*(Block() for _ in range(6)))
        net.forward = lambda x: functools.reduce(lambda x, block: outer(block, x), net, x).square().mean()
        zero = {"stage3_prefetch_bucket_size": 1, "stage3_max_reuse_distance": 0}
        engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=0.1), 3, SHARDED | zero)
        zerosync, peaks = attach(engine), []
        for _ in range(4):
            for _ in range(2):
                engine.backward(engine(torch.ones(2, WIDTH, requires_grad=True)))
            engine.step()
            peaks.append(zerosync.report.peak_unsharded_bytes)
        return peaks

    size = 4 * sum(param.numel() for param in Block().parameters())
    for first, *others in run_ranks(run):  # before it is known what follows
        assert first <= 2 * size and others == [2 * size] * 3


def test_what_comes_otherwise_than_before() -> None:
    """What was gathered ahead of what does not come, or of another order, does not stay."""

    def run() -> None:
        ahead = {"stage3_prefetch_bucket_size": 10**6, "stage3_max_reuse_distance": 0}
        engine = make_engine(net := Net(), sgd(net), 3, SHARDED | ahead)
        attach(engine)
        for order in ((0, 1, 2, 3), (0, 1, 2, 3), (0, 4), (3, 1), (0, 1), (0, 1, 2, 3, 4)):
            with torch.no_grad():
                engine(words(0, rank()), order, False)
            assert {param.ds_status.name for param in net.parameters()} == {"NOT_AVAILABLE"}, order

    run_ranks(run)


def test_parts_that_are_called_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients, in a loop over blocks: each time they are a pass, whatever has come before the loop."""
    monkeypatch.setattr(unit_order, "LONGEST", 8)

    def run() -> None:
        ahead = {"stage3_prefetch_bucket_size": 10**6, "stage3_max_reuse_distance": 0}
        engine = make_engine(net := Net(), sgd(net), 3, SHARDED | ahead)
        attach(engine)
        passes = engine._zerosync_parameters.hooks._forwards
        for prologue in (False, True):
            x, is_ahead = torch.ones(2, WIDTH), False
            with torch.no_grad():
                if prologue:
                    net.words(words(0, 0))
                for _ in range(6):
                    for block in net.blocks:
                        x = block(x)
                        assert len(passes._now) <= 8
                        if block is net.blocks[0]:
                            is_ahead = net.blocks[1].scale.ds_status.name != "NOT_AVAILABLE"
            assert is_ahead

    run_ranks(run)


@pytest.mark.off_device("gathers are into place there, so that nothing is allocated when they arrive")
def test_an_exception_as_values_arrive_leaves_nothing_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may catch it, as when memory runs out, and go on."""

    def run() -> float:
        engine = make_engine(net := Net(), sgd(net), 3, SHARDED | LEAVES)
        oracle = Oracle(plain := Net(), sgd(plain))
        attach(engine)
        stock = gathering.memory_of

        def without_memory(*args: Any) -> Any:
            monkeypatch.setattr(gathering, "memory_of", stock)
            raise torch.OutOfMemoryError("at once")

        for k in range(4):
            if k == 2:
                monkeypatch.setattr(gathering, "memory_of", without_memory)
                with pytest.raises(torch.OutOfMemoryError):
                    engine(words(k, rank()), (0, 1, 2, 3), False)
            step(engine, oracle, k)
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended
def test_a_gather_of_the_program_in_flight_does_not_hide_an_exception() -> None:
    """What it has begun by DeepSpeed's own functions is its own to wait for."""

    def run() -> float:
        engine = make_engine(net := Net(), sgd(net), 3, SHARDED | LEAVES)
        oracle = Oracle(plain := Net(), sgd(plain))
        attach(engine)
        for k in range(3):
            param = net.blocks[4].scale
            handle = param.all_gather_coalesced([param])
            with pytest.raises(TypeError, match="must be Tensor"):
                engine("no batch", (0, 1, 2, 3), False)
            handle.wait()
            param.partition()
            step(engine, oracle, k)
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]


def test_forwards_without_gradients_gather_what_is_not_there() -> None:
    """Within the distance of a reuse, once, whatever a program writes in between; and a step begins anew."""

    def run(distance: int) -> tuple[list[bool], list[float]]:
        engine = make_engine(net := Net(), sgd(net), 3, SHARDED | {"stage3_max_reuse_distance": distance})
        attach(engine)
        counter, gathers, values = ProcessCounter().start(), [], []
        call = (words(0, rank()), (0, 1, 2, 3, 4), False)

        def forward() -> None:
            counter.take()
            with torch.no_grad():
                values.append(engine(*call).item())
            gathers.append(bool(counter.take()))

        for step in range(2):
            engine.backward(engine(*call))
            engine.step()
            for _ in range(3):
                forward()
            with deepspeed.zero.GatheredParameters([net.bias], modifier_rank=0), torch.no_grad():
                net.bias.add_(1.0)
            forward()
            net.blocks[1].norm.weight.data = torch.full((WIDTH,), 2.0 + step)
            forward()
        return gathers, values

    for near, far in zip(run_ranks(run, 10**9), run_ranks(run, 0), strict=True):
        assert near[1] == far[1] and len(set(far[1])) == 6
        assert near[0] == [True, False, False, True, False] * 2 and all(far[0])


@pytest.mark.extended(but=("1000000000-36",))
@pytest.mark.parametrize(("near", "stay"), [(10**9, 36), (600, 9), (0, 0)])
def test_what_stays_for_the_next_micro_batch(near: int, stay: int) -> None:
    """The first units, after each backward but the last, as far as the window before tells; writes count."""

    def run() -> tuple[float, list[int]]:
        net, plain = Net(), Net()
        engine = make_engine(net, sgd(net), 3, SHARDED | {"stage3_max_reuse_distance": near})
        attach(engine)
        oracle, there = Oracle(plain, sgd(plain)), []
        for _ in range(3):
            for k in range(3):
                engine.backward(engine(words(k, rank()), (0, 1, 2, 3, 4), False))
                oracle.backward(lambda r, k=k: plain(words(k, r), (0, 1, 2, 3, 4), False))
                there.append(sum(param.ds_status.name == "AVAILABLE" for param in net.parameters()))
                for each in (net, plain):
                    each.blocks[0].norm.weight.data = torch.full((WIDTH,), 0.25 * (k + 1))
                with deepspeed.zero.GatheredParameters([net.bias], modifier_rank=0), torch.no_grad():
                    net.bias.add_(1.0)
                plain.bias.data.add_(1.0)
            engine.step()
            oracle.step()
        return distance(full_parameters(net), full_parameters(plain)), there

    for error, there in run_ranks(run):
        assert error < 1e-5 and there == [0, *[stay] * 2, *[stay, stay, 0] * 2], (error, there)


class Weight(nn.Module):
    """Returns its parameter as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self) -> torch.Tensor:
        return self.weight


class Hidden(nn.Module):
    """Hides what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(x=self.inner(x) * self.scale)


class Odd(Net):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.hidden = Weight(), nn.ModuleList(Hidden() for _ in range(2))

    def forward(self, words: torch.Tensor, order: tuple[int, ...], in_parts: bool) -> torch.Tensor:
        x = self.words(words) @ self.weight().t()
        for each in self.hidden:
            x = each(x).x
        return (self.blocks[0](x) - 1.0).square().mean()


def test_what_a_unit_returns() -> None:
    """Its parameter itself, on which no hook may stay, there until the step; an object that hides the tensor."""

    def run() -> tuple[float, int]:
        net, plain = Odd(), Odd()
        oracle, engine = Oracle(plain, sgd(plain)), make_engine(net, sgd(net), 3, SHARDED | LEAVES)
        attach(engine)
        hooks = len(net.weight.weight._backward_hooks or ())

        def gathered() -> list[str]:
            return [name for name, param in net.named_parameters() if param.ds_status.name == "AVAILABLE"]

        for step in range(6):
            engine.backward(engine(words(step, rank()), (), False))
            oracle.backward(lambda r, step=step: plain(words(step, r), (), False))
            assert gathered() == ["weight.weight"]
            if step % 2:
                engine.step()
                oracle.step()
                assert gathered() == []
        grown = len(net.weight.weight._backward_hooks or ()) - hooks
        return distance(full_parameters(net), full_parameters(plain)), grown

    assert run_ranks(run) == [(0.0, 0)] * 2


def test_a_copy_of_the_module_gathers_nothing() -> None:
    def run() -> None:
        engine = make_engine(net := Net(), sgd(net), 3, SHARDED)
        zerosync = attach(engine)
        with zerosync.full_parameters():
            copied = copy.deepcopy(net)
        with torch.no_grad():
            expected = engine(words(0, rank()), (0, 1), False)
            if rank() == 0:
                assert torch.equal(copied(words(0, 0), (0, 1), False), expected)

    run_ranks(run)


class Says(Net):
    _no_split_modules = ("Block", "Other")


def named(net: nn.Module, options: dict[str, Any], zero: dict[str, Any]) -> list[str]:
    engine = make_engine(net, sgd(net), 3, SHARDED | zero)
    units = attached_of(attach(engine, **options)).stage.units
    wholes = [each.module for each in units.every if each.params and type(each.module).__name__ in units.counts]
    found = [name for name, module in net.named_modules() if module in wholes]
    assert units.counts.total() == len(found)
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
        set_z3_leaf_modules(net := Net(), [nn.LayerNorm])  # each inside of a block, which is gathered as a whole
        assert named(net, {}, {}) == blocks
        assert named(Net(), {"eager_frames": False}, {}) == blocks
        assert named(Net(), {"unit_modules": ["Linear"]}, {}) == []
        engine = make_engine(net := Net(), sgd(net), 3, SHARDED)
        with pytest.raises(ValueError, match=r"'unit_modules' got 'Blok', and the Net has no .* Block, Embedding"):
            attach(engine, unit_modules=["Blok"])
        engine.destroy()
        with pytest.raises(ValueError, match="'unit_modules' says what ZeRO stage 3 gathers as a whole, found stage 2"):
            attach(make_engine(net := Net(), sgd(net), 2), unit_modules=["Block"])

    run_ranks(run)
