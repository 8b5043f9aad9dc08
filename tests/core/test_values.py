"""Sharded parameters read and written anywhere (N1), against plain torch: ZeRO-3 with nothing persistent."""

import copy
import dataclasses
import io
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.utils import prune

from tests.harness.engines import make_engine, rank, start
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.racecheck import simulate
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.params.values import WATCHED_STEPS

SHARDED = {"stage3_param_persistence_threshold": 0}
HOST = {"device": 0, "host": "1MiB"}


class Net(nn.Module):
    """An embedding, layers, a target that follows them, and a penalty inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(5, 6, padding_idx=2)
        self.online = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.penalty: Callable[[Net], Any] = lambda net: 0.0

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        with torch.no_grad():
            goal = self.target(x)
        return (self.online(x) - goal - 1.0).square().mean() + self.penalty(self)


def data(k: int, of_rank: int) -> torch.Tensor:
    return torch.randint(5, (4,), generator=torch.Generator().manual_seed(10 * k + of_rank))


def sgd(net: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD([*net.words.parameters(), *net.online.parameters()], lr=0.2, momentum=0.9)


def soft_update(net: Net) -> None:
    for target, online in zip(net.target.parameters(), net.online.parameters(), strict=True):
        target.data.mul_(0.75).add_(online.data, alpha=0.25)


def lerp(net: Net) -> None:
    with torch.no_grad():
        for target, online in zip(net.target.parameters(), net.online.parameters(), strict=True):
            target.lerp_(online, 0.25)
            online.clamp_(-0.3, 0.3)


def foreach(net: Net) -> None:
    with torch.no_grad():
        torch._foreach_lerp_(list(net.target.parameters()), list(net.online.parameters()), 0.25)
        torch._foreach_mul_([param.detach() for param in net.online.parameters()], 0.5)


def mix(net: Net) -> None:
    for target, online in zip(net.target.parameters(), net.online.parameters(), strict=True):
        target.data.copy_(0.1 * online.data + 0.9 * target.data)
        online.data = online.data.clamp(-0.3, 0.3)


def sync(net: Net) -> None:
    net.target.load_state_dict(net.online.state_dict())


def load(net: Net) -> None:
    net.target.load_state_dict({name: torch.full_like(v, 0.1) for name, v in net.online.state_dict().items()})
    net.online[0].load_state_dict({"weight": torch.full((6, 6), 0.2), "bias": torch.ones(6)})


def restore(net: Net) -> None:
    """Copies of a state are of when they were made; what is not copied shows what comes later."""
    live = net.state_dict()
    best, moved = copy.deepcopy(live), {name: value.detach().cpu().double() for name, value in live.items()}
    with torch.no_grad():
        for param in net.parameters():
            param.mul_(0.5)
    mean = {name: value.clone().mul_(0.25).add_(best[name]) for name, value in live.items()}
    net.online.load_state_dict({name: best[f"online.{name}"].clone() for name in net.online.state_dict()})
    net.target.load_state_dict({name: moved[f"target.{name}"].float() for name in net.target.state_dict()})
    net.words.load_state_dict({"weight": mean["words.weight"] - 0.1 * live["words.weight"]})


def initialize(net: Net) -> None:
    torch.manual_seed(3)
    net.words.reset_parameters()  # normal_, and zero for the padding
    nn.init.orthogonal_(net.target[0].weight)
    nn.init.xavier_uniform_(net.online[2].weight)
    nn.init.zeros_(net.online[0].bias)
    net.online[0].reset_parameters()


def views(net: Net) -> None:
    with torch.no_grad():
        net.words.weight[1] = 0.5
        net.words.weight[3, 2:4].fill_(0.25)
        net.words.weight.data.view(-1)[3] += 1.0
        net.online[0].weight.t()[0].mul_(2.0)
        for row in (net.target[0].weight.data[2:]).unbind():
            row.zero_()
        torch.mul(net.target[0].bias, 2, out=net.target[0].bias)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(net.target[2].bias) / 2, [net.target[2].bias])


WRITES = [soft_update, lerp, foreach, mix, sync, load, restore, initialize, views]


@pytest.mark.extended(but=("3, offloaded",))
@pytest.mark.parametrize(
    ("stage", "zero", "options"),
    [
        (2, {}, {}),
        (3, {}, {}),
        (3, SHARDED, {}),
        (3, SHARDED, {"param_memory_budget": "all"}),
        (3, {**SHARDED, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}, {}),
    ],
    ids=["2", "3, persistent", "3", "3, held", "3, offloaded"],
)
def test_writes_last(stage: int, zero: dict[str, Any], options: dict[str, Any]) -> None:
    """Between a backward and its step, after the step, and after an evaluation, which leaves parameters gathered."""

    def run() -> dict[str, float]:
        errors = {}
        for write in WRITES:
            net = Net()
            plain = copy.deepcopy(net)
            engine, oracle = make_engine(net, sgd(net), stage, zero), Oracle(plain, sgd(plain))
            attach(engine, **options)

            def backward(k: int, engine: Any = engine, oracle: Oracle = oracle, plain: Net = plain) -> None:
                engine.backward(engine(data(k, rank())))
                oracle.backward(lambda r: plain(data(k, r)))

            def both(call: Callable[[Any], Any], engine: Any = engine, oracle: Oracle = oracle) -> None:
                call(engine)
                call(oracle)

            for k in range(3):
                backward(k)
                if k == 1:
                    both(lambda trained, write=write: write(trained.module))
                both(lambda trained: trained.step())
                if k == 0:
                    both(lambda trained, write=write: write(trained.module))
            with torch.no_grad():
                engine(data(9, rank()))
            both(lambda trained, write=write: write(trained.module))
            backward(5)
            both(lambda trained: trained.step())
            errors[write.__name__] = distance(full_parameters(net), full_parameters(plain))
            engine.destroy()
        return errors

    for errors in run_ranks(run):
        assert errors == dict.fromkeys(errors, 0.0)


class Writer(nn.Linear):
    """Writes to its own weight in each of its forwards from the ``first`` on."""

    def __init__(self, write: Callable[[nn.Parameter], None], first: int) -> None:
        super().__init__(6, 6, bias=False)
        self.write, self.to_come = write, first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.to_come <= 0:
            self.write(self.weight)
        self.to_come -= 1
        return super().forward(x)


class EveryOther(Writer):
    """Writes in every other forward, beginning with the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.to_come = -self.to_come  # 0, and 1 where it was -1
        return super().forward(x)


def scale(weight: nn.Parameter) -> None:
    weight.data.mul_(0.9)


def clear(weight: nn.Parameter) -> None:
    weight.data[0].zero_()  # a part of one rank's shard


def replace(weight: nn.Parameter) -> None:
    weight.data = weight.data * 0.9


@torch.no_grad()
def without_grad(weight: nn.Parameter) -> None:
    weight.mul_(0.9)


OWN_WRITES: list[tuple[Callable[[nn.Parameter], None], int]] = [
    (scale, 0), (clear, 0), (replace, 2), (without_grad, WATCHED_STEPS + 1),
]  # fmt: skip
TORN = pytest.mark.off_device("a copy that nobody will read is made while a module begins to write")


@pytest.mark.extended(but=("cpu-host-clear",))
@pytest.mark.parametrize(
    ("budget", "write", "first"),
    [
        pytest.param(
            budget, write, first, id=f"{name}-{write.__name__}", marks=[TORN] if name == "host" and first > 3 else []
        )
        for name, budget in (("", 0), ("held", "all"), ("host", HOST))
        for write, first in OWN_WRITES
    ],
)
@pytest.mark.parametrize("device", [nullcontext, simulate], ids=["cpu", "streams"])
def test_what_a_module_writes_to_its_own_parameters_lasts(
    budget: Any, write: Callable[[nn.Parameter], None], first: int, device: Callable[[], Any]
) -> None:
    """Without a trace but the values, where it begins within the first steps; else where torch counts the write."""

    def run() -> float:
        with device():
            return train()

    def train() -> float:
        start()
        torch.manual_seed(0)
        net = nn.Sequential(Writer(write, first), nn.Tanh(), nn.Linear(6, 3))
        plain = copy.deepcopy(net)
        engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=0.2), 3, SHARDED)
        oracle = Oracle(plain, torch.optim.SGD(plain.parameters(), lr=0.2), world_size=1)
        attach(engine, param_memory_budget=budget)
        for k in range(WATCHED_STEPS + 3):
            x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(k))
            engine.backward(engine(x[rank()]).square().mean())
            engine.step()
            oracle.backward(lambda _, x=x: plain(x.view(8, 6)).square().mean())  # one forward, and one write
            oracle.step()
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]


def test_what_is_looked_for_in_the_first_steps_is_found_after_loads(tmp_path: Path) -> None:
    def run() -> list[bool]:
        net = nn.Sequential(Writer(scale, 0))
        attach(engine := make_engine(net, torch.optim.SGD(net.parameters(), lr=0.0), 3, SHARDED))
        engine.save_checkpoint(tmp_path, tag="saved")
        for _ in range(WATCHED_STEPS):
            engine.load_checkpoint(tmp_path, tag="saved")
        lasts = []
        for _ in range(WATCHED_STEPS):
            before = full_parameters(net)
            engine.backward(engine(torch.ones(2, 6)).sum())
            engine.step()
            lasts.append(bool(torch.equal(full_parameters(net)["0.weight"], 0.9 * before["0.weight"])))
        return lasts

    assert run_ranks(run) == [[True] * WATCHED_STEPS] * 2


@pytest.mark.extended
@pytest.mark.parametrize("budget", [0, HOST, {"device": 0, "node": "all"}])
def test_what_one_rank_alone_finds_in_its_shard_is_in_the_copies_of_all(budget: Any) -> None:
    """A module clears a part of one rank's shard in the first micro-batch, and the second one uses it."""

    def run() -> float:
        start()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), EveryOther(clear, 0), nn.Linear(6, 3))
        plain = copy.deepcopy(net)
        engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=0.2), 3, SHARDED)
        oracle = Oracle(plain, torch.optim.SGD(plain.parameters(), lr=0.2), world_size=1)
        attach(engine, param_memory_budget=budget, node_size=2)
        for k in range(2 * (WATCHED_STEPS + 3)):
            x = torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(k))
            engine.backward(engine(x[rank()]).square().mean())
            oracle.backward(lambda _, x=x: plain(x.view(16, 6)).square().mean())
            if k % 2:
                engine.step()
                oracle.step()
        return distance(full_parameters(net), full_parameters(plain))

    assert max(run_ranks(run, world_size=4)) < 1e-6


def test_new_data_of_another_kind_from_a_module_that_runs() -> None:
    def run() -> None:
        net = nn.Sequential(Writer(lambda weight: setattr(weight, "data", weight.data[:3]), 0))
        engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=0.2), 3, SHARDED)
        attach(engine)
        with pytest.raises(ValueError, match=r"'0\.weight', sharded by ZeRO-3, was given new data: \(3, 6\) of"):
            engine(torch.ones(2, 6))

    run_ranks(run)


@dataclasses.dataclass(slots=True)
class Output:
    """Has no attributes that ``vars()`` finds."""

    x: torch.Tensor


class Outputs(nn.Module):
    """A module that returns a number, one that returns an object, and one that takes it."""

    class Mean(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x).mean().item()

    class Wrap(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return Output(super().forward(x))

    class Unwrap(nn.Linear):
        def forward(self, given: Any) -> torch.Tensor:
            return super().forward(given.x)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mean, self.wrap, self.unwrap = self.Mean(6, 6), self.Wrap(6, 6), self.Unwrap(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unwrap(self.wrap(torch.tanh(x))).square().mean() * self.mean(x)


def both(net: nn.Module, plain: nn.Module, zero: dict[str, Any]) -> tuple[Any, Oracle]:
    """What trains ``net`` on ZeRO-3, and ``plain`` in plain torch."""
    engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=0.2), 3, zero)
    return engine, Oracle(plain, torch.optim.SGD(plain.parameters(), lr=0.2))


@pytest.mark.extended(but=("options1",))
@pytest.mark.parametrize("options", [{}, {"param_memory_budget": "all"}])
def test_modules_return_and_take_anything(options: dict[str, Any]) -> None:
    def run() -> float:
        net = Outputs()
        plain = copy.deepcopy(net)
        engine, oracle = both(net, plain, SHARDED)
        attach(engine, **options)
        for k in range(3):
            x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(k))
            engine.backward(engine(x[rank()]))
            oracle.backward(lambda r, x=x: plain(x[r]))
            engine.step()
            oracle.step()
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended(but=("zero2-options2",))
@pytest.mark.parametrize(
    ("zero", "options"),
    [({}, {}), (SHARDED, {}), (SHARDED, {"param_memory_budget": "all"}), (SHARDED, {"param_memory_budget": HOST})],
)
def test_training_after_a_forward_in_inference_mode(zero: dict[str, Any], options: dict[str, Any]) -> None:
    """It gathers parameters, which a backward needs later: as a validation does, or a look at one."""

    def run() -> float:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3))
        plain = copy.deepcopy(net)
        engine, oracle = both(net, plain, zero)
        attach(engine, **options)
        for k in range(4):
            x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(k))
            for inside in (lambda x=x: engine(x[rank()]), lambda: net[1].weight.norm(), None):
                if k != 1 and inside is not None:
                    with torch.inference_mode():
                        inside()
                engine.backward(engine(x[rank()]).square().mean())
                oracle.backward(lambda r, x=x: plain(x[r]).square().mean())
            engine.step()
            oracle.step()
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]


def penalty(net: Net) -> torch.Tensor:
    return 0.1 * sum(param.pow(2).sum() for param in net.online.parameters()) + net.words.weight.abs().mean()


@pytest.mark.extended
@pytest.mark.parametrize(("zero", "options"), [({}, {}), (SHARDED, {}), (SHARDED, {"param_memory_budget": "all"})])
def test_penalties_on_parameters_train_them(zero: dict[str, Any], options: dict[str, Any]) -> None:
    """Computed beside the loss, and inside a forward."""

    def run() -> list[float]:
        errors = []
        for inside in (False, True):
            net = Net()
            plain = copy.deepcopy(net)
            engine, oracle = make_engine(net, sgd(net), 3, zero), Oracle(plain, sgd(plain))
            attach(engine, **options)
            net.penalty = plain.penalty = penalty if inside else net.penalty
            for k in range(3):
                for part in range(2):
                    loss = engine(data(2 * k + part, rank())) + (0 if inside else penalty(net))
                    engine.backward(loss)
                    oracle.backward(
                        lambda r, k=2 * k + part, i=inside, p=plain: p(data(k, r)) + (0 if i else penalty(p))
                    )
                engine.step()
                oracle.step()
            errors.append(distance(full_parameters(net), full_parameters(plain)))
            engine.destroy()
        return errors

    for errors in run_ranks(run):
        assert max(errors) == 0.0


@pytest.mark.extended
def test_a_penalty_in_a_compiled_forward() -> None:
    def run() -> float:
        net = Net()
        plain = copy.deepcopy(net)
        net.penalty = plain.penalty = penalty
        engine, oracle = make_engine(net, sgd(net), 3, SHARDED), Oracle(plain, sgd(plain))
        attach(engine)
        engine.compile(backend="aot_eager")
        for k in range(2):
            engine.backward(engine(data(k, rank())))
            oracle.backward(lambda r, k=k: plain(data(k, r)))
            engine.step()
            oracle.step()
        return distance(full_parameters(net), full_parameters(plain))

    for error in run_ranks(run):
        assert error == 0.0


@pytest.mark.extended
def test_what_is_written_is_saved(tmp_path: Path) -> None:
    """Of parameters that DeepSpeed keeps gathered, and of sharded ones, before any step follows."""

    def run(stage: int, zero: dict[str, Any]) -> None:
        net = Net()
        engine = make_engine(net, sgd(net), stage, zero)
        attach(engine)
        engine.backward(engine(data(0, rank())))
        engine.step()
        for param in net.parameters():
            param.data.fill_(0.5)
        engine.save_checkpoint(str(tmp_path))
        for param in net.parameters():
            param.data.zero_()
        engine.load_checkpoint(str(tmp_path))
        assert all((full == 0.5).all() for full in full_parameters(net).values())
        engine.optimizer.param_groups[0]["lr"] = 0.0
        engine.backward(engine(data(1, rank())))
        engine.step()
        assert all((full == 0.5).all() for full in full_parameters(net).values())

    for stage, zero in ((1, {}), (2, {}), (3, {}), (3, SHARDED)):
        run_ranks(run, stage, zero)


def test_what_is_read_is_there() -> None:
    """At rest; after a forward, which leaves parameters gathered or on their way; and after a step."""

    def run() -> None:
        net = Net()
        engine = make_engine(net, sgd(net), 3, SHARDED)
        zerosync = attach(engine)

        def check() -> None:
            expected = full_parameters(net)
            for name, param in net.named_parameters():
                assert torch.equal(param, expected[name]) and torch.equal(param.data, expected[name])
                assert param.norm() == expected[name].norm() and param.shape == expected[name].shape
                assert len(param) == len(expected[name]) and param.numel() == expected[name].numel()
                assert param.dim() == param.data.dim() == expected[name].dim()
                assert type(param * 1) is torch.Tensor and isinstance(param, nn.Parameter)
                assert param.requires_grad == (not name.startswith("target")) and not param.detach().requires_grad
                assert param.to(param.device) is param and param.float() is param
                assert param.double().dtype is torch.float64 and param.grad is None
            assert torch.equal(net.online[0].weight @ torch.ones(6), expected["online.0.weight"] @ torch.ones(6))
            twin = copy.deepcopy(net.online[0].weight)
            assert type(twin) is nn.Parameter and torch.equal(twin, expected["online.0.weight"])
            assert str(list(net.online[0].weight.T.shape)) == "[6, 6]" and "sharded" in repr(net.online[0].weight)

        check()
        loss = engine(data(0, rank()))
        net.online[0].weight.register_hook(lambda grad: None)
        engine.backward(loss)
        engine.zero_grad()
        check()
        with torch.inference_mode():
            engine(data(0, rank()))
            assert net.online[0].weight.norm() == full_parameters(net)["online.0.weight"].norm()
        check()
        engine.backward(engine(data(0, rank())))
        engine.step()
        check()
        zerosync.detach()
        assert {type(param) for param in net.parameters()} == {nn.Parameter}
        engine.backward(engine(data(0, rank())))
        engine.step()

    run_ranks(run)


class Looking(nn.Module):
    """Its forward reads parameters of a layer that does not run, and uses one that it has read without gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.runs, self.read = nn.Linear(4, 4), nn.Linear(4, 3)
        self.read.bias.requires_grad_(False)
        self.seen: set[Any] = set()
        self.writes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes and not torch.is_inference_mode_enabled():  # new data made there could not be trained
            self.read.bias.data = torch.full((3,), 0.5)
            self.read.weight.data = self.read.weight.data.clamp(-0.1, 0.1)
        with torch.no_grad():
            weight, bias = self.read.weight, self.read.bias
        twin = copy.deepcopy(weight)
        for param in (weight, bias, self.read.weight):
            self.seen.add((param.requires_grad, param.is_leaf, param.grad_fn, param.shape, self.training))
        self.seen.add((type(twin), twin.requires_grad, (weight * 1).requires_grad, weight.detach().requires_grad))
        return nn.functional.linear(self.runs(x), self.read.weight) + (x @ weight.t() + bias)


@pytest.mark.parametrize("options", [{}, {"param_memory_budget": "all"}], ids=["gathered", "held"])
def test_what_a_forward_reads_answers_as_the_parameter_does(options: dict[str, Any]) -> None:
    def run() -> float:
        net = Looking()
        plain = copy.deepcopy(net)
        engine, oracle = make_engine(net, trained(net), 3, SHARDED), Oracle(plain, trained(plain))
        attach(engine, **options)
        for k in range(4):
            net.writes = plain.writes = k == 2
            engine.backward(engine(inputs(k, rank())).square().sum())
            oracle.backward(lambda r, k=k: plain(inputs(k, r)).square().sum())
            engine.step()
            oracle.step()
            engine.zero_grad()
            for model in (engine, plain):
                model.eval()
                for without_gradients in (torch.no_grad, torch.inference_mode):
                    with without_gradients():
                        model(torch.ones(1, 4))
                model.train()
        assert net.seen == plain.seen
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]


def trained(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in net.parameters() if param.requires_grad], lr=0.1, momentum=0.9)


def inputs(k: int, of_rank: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(2 * k + of_rank))


@pytest.mark.extended(but=("3, held",))
@pytest.mark.parametrize(
    ("stage", "options"), [(2, {}), (3, {}), (3, {"param_memory_budget": "all"})], ids=["2", "3", "3, held"]
)
def test_pruning(stage: int, options: dict[str, Any]) -> None:
    """Before the engine is built and later, one layer and all, twice, and made permanent; and other attributes."""

    def run() -> float:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        plain = copy.deepcopy(net)
        for model in (net, plain):
            prune.custom_from_mask(model[4], "weight", torch.arange(18).view(3, 6) % 3 > 0)
        engine, oracle = make_engine(net, trained(net), stage, SHARDED), Oracle(plain, trained(plain))
        attach(engine, **options)

        def train(k: int) -> None:
            engine.backward(engine(inputs(k, rank())).square().sum())
            oracle.backward(lambda r: plain(inputs(k, r)).square().sum())
            engine.step()
            oracle.step()
            engine.zero_grad()

        def layers(model: Any) -> list[tuple[nn.Module, str]]:
            return [(model[index], name) for index in (0, 2, 4) for name in ("weight", "bias")]

        edits: list[Callable[[Any], Any]] = [
            lambda model: prune.l1_unstructured(model[0], "weight", 0.3),
            lambda model: prune.global_unstructured(layers(model), prune.L1Unstructured, amount=0.2),
            lambda model: prune.ln_structured(model[2], "weight", 0.2, n=2, dim=0),
            lambda model: [prune.remove(*layer) for layer in layers(model)],
            lambda model: prune.l1_unstructured(model[0], "weight", 0.3),
        ]
        train(0)
        for k, edit in enumerate(edits, 1):
            for model in (net, plain):
                edit(model)
            assert [name for name, _ in net.named_parameters()] == [name for name, _ in plain.named_parameters()]
            assert net[0].weight.shape == (6, 4) and net[0].weight.requires_grad
            train(2 * k)
            train(2 * k + 1)
            for (name, ours), theirs in zip(net.named_buffers(), plain.buffers(), strict=True):
                assert torch.equal(ours, theirs), name  # masks: what is pruned is the least by far
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]


def test_tied_weights_that_are_gathered_are_found() -> None:
    """As transformers finds them when it saves after an evaluation: by where they begin and where they end."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(x))

    def run() -> tuple[set[int], int]:
        torch.manual_seed(0)
        net = Tied()
        engine = make_engine(net, trained(net), 3, SHARDED)
        attach(engine)
        engine.backward(engine(torch.arange(7)).square().mean())
        engine.step()
        for _ in range(2):
            with torch.no_grad():
                engine(torch.arange(7))
        entries = net.state_dict().values()
        begins = {entry.data_ptr() for entry in entries}
        assert all(entry.nelement() for entry in entries), "as they are gathered"
        sizes = {entry.view(-1)[-1].data_ptr() + entry.element_size() - entry.data_ptr() for entry in entries}
        return sizes, len(begins)

    assert run_ranks(run) == [({7 * 4 * 4}, 1)] * 2


def test_a_state_dict_of_what_an_engine_has_left_sharded() -> None:
    """As a program that saves after ``accelerator.end_training()``."""

    def run() -> None:
        engine = make_engine(net := Net(), sgd(net), 3, SHARDED)
        attach(engine)
        engine.destroy()
        with pytest.warns(UserWarning, match=r"engine of the Net was destroyed.*'words.weight', is empty"):
            assert net.state_dict()["words.weight"].numel() == 0

    run_ranks(run)


def test_one_rank_saves_a_state_alone() -> None:
    """And then gathers the weights with the others, as DeepSpeed-Chat and OpenRLHF do."""

    def run() -> None:
        net = Net()
        engine = make_engine(net, sgd(net), 3, SHARDED)
        attach(engine)
        engine.backward(engine(data(0, rank())))
        engine.step()
        if rank() == 0:
            state, file = net.state_dict(), io.BytesIO()
            shared = list(state)[1:]
            assert {state[name].untyped_storage().data_ptr() for name in shared} == {0}
            copies = state | {name: state[name].clone() for name in shared}  # as PEFT for safetensors
            others = net.online.state_dict()
            assert copies["online.0.bias"].shape == net.online[0].bias.shape
            with pytest.warns(UserWarning, match=r"what is written is empty.*zerosync.export\(directory\)") as warned:
                torch.save(copy.deepcopy(state), file)
                torch.save(others, io.BytesIO())
                written = [
                    safetensors.torch.load(safetensors.torch.save(of)) for of in (copies, net.online.state_dict())
                ]
            assert len(warned) == 1
            file.seek(0)
            for loaded in (torch.load(file), written[0]):
                assert loaded.keys() == state.keys()
                with pytest.raises(RuntimeError, match=r"size mismatch for words.weight"):
                    Net().load_state_dict(loaded)
        with torch.no_grad():
            engine(data(1, rank()))
        found, files, expected = {}, (io.BytesIO(), io.BytesIO()), full_parameters(net)
        for name, param in net.named_parameters():
            with deepspeed.zero.GatheredParameters([param]):
                found[name] = param.data.clone()
                if param is net.words.weight:  # saved as it is
                    torch.save({name: net.state_dict()[name]}, files[1])
        torch.save(found, files[0])
        for file in files:
            file.seek(0)
        assert distance(torch.load(files[0]), expected) == 0.0
        assert distance(torch.load(files[1]), {"words.weight": expected["words.weight"]}) == 0.0
        full = full_parameters(net)["words.weight"].sum(-1).tolist()
        assert net.words.state_dict()["weight"].sum(-1).tolist() == full
        best = net.state_dict()["words.weight"].clone()
        engine.zerosync.detach()
        assert best.sum(-1).tolist() == full
        engine.destroy()

    run_ranks(run)


def test_what_cannot_be_right_is_an_error() -> None:
    def run() -> None:
        net = Net()
        engine = make_engine(net, sgd(net), 3, SHARDED)
        zerosync = attach(engine)
        weight, row = net.online[0].weight, net.online[0].weight.data[0]
        assert row.norm() == full_parameters(net)["online.0.weight"][0].norm()
        weight.data.mul_(2)
        for use in (row.norm, row.zero_):
            with pytest.raises(RuntimeError, match=r"'online.0.weight'.*after the parameter had changed"):
                use()
        row = weight.data[0]
        engine.backward(engine(data(0, rank())))
        engine.step()
        with pytest.raises(RuntimeError, match=r"after the parameter had changed.*zerosync.full_parameters\(\)"):
            row.zero_()
        with pytest.raises(RuntimeError, match=r"to be saved while ZeRO-3 has it sharded.*full_state\(\)"):
            torch.save(weight, io.BytesIO())
        with pytest.raises(RuntimeError, match=r"leaf Variable|in-place|inplace"):
            weight.mul_(2)  # requires a gradient
        with pytest.raises(ValueError, match=r"new data: \(3,\) of torch.float32 on cpu, where it is \(6, 6\)"):
            weight.data = torch.zeros(3)
        with zerosync.full_parameters():
            torch.save(net.state_dict(), io.BytesIO())
            assert type(weight) is nn.Parameter and weight.data_ptr()
        engine.destroy()

        engine = make_engine(net := Net(), sgd(net), 3, SHARDED)
        zerosync = attach(engine, eager_frames=False)
        engine.backward(engine(data(0, rank())))
        for use in (net.online[0].weight.norm, net.online[0].weight.data.zero_):
            with pytest.raises(RuntimeError, match=r"'online.0.weight' was read or written .*zerosync.full_parameters"):
                use()
        engine.step()
        with zerosync.full_parameters():
            net.online[0].weight.data.zero_()
        assert not full_parameters(net)["online.0.weight"].any()

    run_ranks(run)
