"""What a program may do, with gradients and parameters in shards of the node: as plain torch, on 2 x 2 ranks."""

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.harness.beside import Beside
from tests.harness.data import noise
from tests.harness.engines import make_engine, rank, start
from tests.harness.oracle import NORM, Oracle, backward_all, distance, full_parameters
from tests.harness.ranks import SIMULATED, run_ranks
from tests.harness.rounding import excess
from zerosync_strategy import attach, shard_over
from zerosync_strategy.core.params.copies import pinned_blocks

WIDTH, RANKS, STEPS = 16, 4, 3
NODES = {"LOCAL_WORLD_SIZE": "2"}
LAYER = 4 * WIDTH * WIDTH
NODE = {"device": 0, "node": "all"}
MIXED = {"device": LAYER, "node": LAYER}  # of five layers; the rest is reduced and gathered as without nodes
inputs = noise(RANKS, WIDTH)


class Net(nn.Module):
    """Layers with and without a bias, and a parameter of fewer elements than ranks."""

    def __init__(self, seed: int = 1, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=k % 2 == 0) for k in range(5))
        self.scale = nn.Parameter(torch.ones(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.reentrant is None or not (x.requires_grad or not self.reentrant):
                x = layer(x).tanh()
            else:
                x = checkpoint(lambda y, layer=layer: layer(y).tanh(), x, use_reentrant=self.reentrant)
        return x * self.scale[0]


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in module.parameters() if param.requires_grad], lr=5e-3)


def loss_of(module: Any, k: int, of_rank: int) -> torch.Tensor:
    return module(inputs(k, of_rank)).square().mean()


class Case(Beside):
    """With both budgets."""

    def __init__(
        self, stage: int, budget: Any, make: Callable[[], nn.Module] = Net, zero: Any = None, params: Any = None,
        **options: Any,
    ) -> None:  # fmt: skip
        self.options = {"grad_memory_budget": budget, **options}
        if stage == 3:
            self.options["param_memory_budget"] = params or budget
        zero = {"stage3_param_persistence_threshold": 0, **(zero or {})}
        super().__init__(make, adamw, loss_of, stage, zero, self.options, RANKS)

    def train(self, steps: range = range(STEPS)) -> None:
        for step in steps:
            for k in range(2):
                self.backward(2 * step + k)
            self.step()

    def modules(self) -> tuple[Any, Any]:
        return self.net, self.plain


Errors = Iterator[float]
"""Each is 0.0 where the program is right."""


def hooks_norms_and_clipping(stage: int, budget: Any, _: Path) -> Errors:
    case = Case(stage, budget)
    for module in case.modules():
        for param in module.parameters():
            param.register_hook(lambda gradient: 0.5 * gradient)
    for step in range(STEPS):
        for k in range(2):
            case.backward(2 * step + k)
        norm = float(case.zerosync.gradient_norm())
        case.zerosync.clip_next_step(0.01)
        case.engine.step()
        expected = case.oracle.step(clip=0.01)
        yield max(0.0, abs(norm / expected - 1) - NORM)
    yield case.error()


def gradients_that_are_read(stage: int, budget: Any, _: Path) -> Errors:
    case = Case(stage, budget)
    for step in range(STEPS):
        for k in range(2):
            case.backward(2 * step + k)
        params, expected = list(case.engine.module.parameters()), case.oracle.gradients()
        if step == 0:
            found = [safe_get_full_grad(param) for param in params]
        else:
            with case.zerosync.full_gradients():
                found = [param.grad.clone() for param in params]
        yield max(excess(ours.float(), theirs) for ours, theirs in zip(found, expected, strict=True))
        case.step()
    yield case.error()


def means_over_items(stage: int, budget: Any, _: Path) -> Errors:
    def items(k: int, of_rank: int) -> int:
        return (7 * of_rank + k) % 5  # none, too

    case = Case(stage, budget, loss_reduction="sum")
    summed = lambda module, k, of_rank: items(k, of_rank) * loss_of(module, k, of_rank)  # noqa: E731
    for step in range(STEPS):
        ks = range(2 * step, 2 * step + 2)
        total = sum(items(k, of_rank) for k in ks for of_rank in range(RANKS))
        for k in ks:
            case.zerosync.mean_over(items(k, rank()))
            case.engine.backward(summed(case.engine, k, rank()))
            case.oracle.backward(lambda of_rank, k=k, total=total: summed(case.plain, k, of_rank) * RANKS / total)
        case.step()
    yield case.error()


def frozen_and_thawed(stage: int, budget: Any, _: Path) -> Errors:
    def make() -> nn.Module:
        net = Net()
        net.layers[4].requires_grad_(False)  # for ever
        return net

    case = Case(stage, budget, make)
    for step in range(4):
        for module in case.modules():
            module.layers[1].requires_grad_(step % 2 == 1)
            module.layers[2].requires_grad_(step > 1)
        case.train(range(step, step + 1))
    yield case.error()


def checkpointed_activations(stage: int, budget: Any, _: Path) -> Errors:
    for reentrant in (True, False):
        case = Case(stage, budget, lambda reentrant=reentrant: Net(reentrant=reentrant))
        case.train()
        yield case.error()


def reads_in_mid_window(stage: int, budget: Any, _: Path) -> Errors:
    case = Case(stage, budget)
    engine, zerosync = case.engine, case.zerosync
    for step in range(STEPS):
        case.backward(2 * step)
        yield distance(dict(zerosync.full_weights()), full_parameters(case.plain))
        with zerosync.gathered_for_inference(), torch.no_grad():
            for k in range(1 + rank()):  # as many as it likes
                engine(inputs(900 + k, rank()))
        with torch.no_grad():
            engine(inputs(800, rank()))
        read = {name: 1.0 * param.detach() for name, param in engine.module.named_parameters()}
        yield distance(read, full_parameters(case.plain))
        case.backward(2 * step + 1)
        case.step()
    yield case.error()


def saved_in_mid_window(stage: int, budget: Any, folder: Path) -> Errors:
    """It goes on exactly; what is loaded is what the last step left, also in mid-window, and trains from there."""
    case = Case(stage, budget)
    case.train(range(1))
    case.backward(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case.engine.save_checkpoint(folder)
    case.backward(3)
    case.step()
    yield case.error()
    case.backward(99)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case.engine.load_checkpoint(folder)
    again = Case(stage, budget)
    again.train(range(1))
    again.engine, again.net = case.engine, case.net
    again.train(range(5, 7))
    yield again.error()


def promises_and_dropped_gradients(stage: int, budget: Any, _: Path) -> Errors:
    case = Case(stage, budget)
    case.backward(50)
    case.engine.zero_grad()
    case.oracle.zero_grad()
    for step in range(STEPS):
        for k in range(3):
            if k != 1:
                case.zerosync.window.expect_last()  # another one follows
            case.backward(3 * step + k)
        if step == 1:
            case.zerosync.reduce()
        case.step()
    yield case.error()


def two_engines(stage: int, budget: Any, _: Path) -> Errors:
    """A GAN: the generator's loss goes through the discriminator, whose gradients of it are dropped."""
    generator, critic = Case(stage, budget), Case(stage, budget, lambda: Net(2))

    def of_critic(generator: Any, critic: Any, k: int, of_rank: int) -> torch.Tensor:
        made = generator(inputs(k, of_rank)).detach()
        return (critic(made) - 1).square().mean() + critic(inputs(k + 70, of_rank)).square().mean()

    for step in range(2):
        for k in range(2 * step, 2 * step + 2):
            critic.engine.backward(of_critic(generator.engine, critic.engine, k, rank()))
            critic.oracle.backward(lambda of_rank, k=k: of_critic(generator.plain, critic.plain, k, of_rank))
        critic.step()
        for k in range(2 * step, 2 * step + 2):
            through = nn.Sequential(generator.plain, critic.plain)
            generator.engine.backward(critic.engine(generator.engine(inputs(k, rank()))).square().mean())
            backward_all(
                [generator.oracle, critic.oracle], lambda of_rank, k=k, both=through: loss_of(both, k, of_rank)
            )
        generator.step()
        critic.engine.zero_grad()
        critic.oracle.zero_grad()
    yield generator.error()
    yield critic.error()


def attached_anew(stage: int, budget: Any, _: Path) -> Errors:
    case = Case(stage, budget)
    case.train(range(2))
    case.zerosync.detach()
    case.zerosync = attach(case.engine, **case.options)
    case.train(range(2, 4))
    yield case.error()


def other_options(stage: int, budget: Any, _: Path) -> Errors:
    zero = {"offload_optimizer": {"device": "cpu"}}
    if stage == 3:
        zero["offload_param"] = {"device": "cpu"}
    for given in (
        {"zero": zero}, {"reduction": "ordered", "overlap_last": False}, *([{"eager_frames": False}] * (stage == 3)),
    ):  # fmt: skip
        case = Case(stage, budget, **given)
        case.train()
        assert stage < 3 or case.zerosync.report.peak_node_bytes > 0, given
        yield case.error()


def host_memory_beside(stage: int, budget: Any, _: Path) -> Errors:
    if stage < 3:
        return
    two = 2 * (sum(pinned_blocks(LAYER)) if os.environ.get(SIMULATED) else LAYER)  # pinned memory has pages
    for params in (
        {"device": 0, "node": LAYER, "host": "all"}, {"device": LAYER, "node": LAYER, "host": two},
        {"node": "all", "host": "all"},
    ):  # fmt: skip
        case = Case(stage, budget, params=params)
        case.train()
        report = case.zerosync.report
        assert report.peak_node_bytes > 0 and (report.peak_host_bytes > 0 or params["node"] == "all"), report
        yield case.error()


def groups_of_ranks(stage: int, budget: Any, _: Path) -> Errors:
    """Parameters of one node, and of one rank on each: these have one level."""
    if stage < 3:
        return
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank() // 2]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank() % 2]
    net, plain = Net(), Net()
    shard_over(rows, net.layers[1])
    shard_over(columns, net.layers[2])
    own: list[Any] = [plain.layers, copy.deepcopy(plain.layers)]  # of the first group of each kind, and of the second
    plain.others = own[1]

    def forward(x: torch.Tensor, of_rank: int) -> torch.Tensor:
        group = {1: of_rank // 2, 2: of_rank % 2}
        for k in range(5):
            x = own[group.get(k, 0)][k](x).tanh()
        return (x * plain.scale[0]).square().mean()

    engine = make_engine(net, adamw(net), 3, {"stage3_param_persistence_threshold": 0})
    attach(engine, grad_memory_budget=budget, param_memory_budget=budget)
    for k in (0, 3, 4):
        own[1][k].requires_grad_(False)
    oracle = Oracle(plain, adamw(plain), RANKS)
    for step in range(STEPS):
        for k in range(2 * step, 2 * step + 2):
            engine.backward(loss_of(engine, k, rank()))
            oracle.backward(lambda of_rank, k=k: forward(inputs(k, of_rank), of_rank))
        engine.step()
        oracle.step()
    expected = full_parameters(plain)
    for k, of_own in ((1, rank() // 2), (2, rank() % 2)):
        for name in [name for name in expected if name.startswith(f"layers.{k}.")]:
            expected[name] = expected[name.replace("layers", "others") if of_own else name]
    yield distance(full_parameters(net), {name: value for name, value in expected.items() if "others" not in name})


CASES = (
    hooks_norms_and_clipping, gradients_that_are_read, means_over_items, frozen_and_thawed, checkpointed_activations,
    reads_in_mid_window, saved_in_mid_window, promises_and_dropped_gradients, two_engines, attached_anew,
    other_options, host_memory_beside, groups_of_ranks,
)  # fmt: skip


@pytest.mark.extended
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("stage", "budget"), [(1, MIXED), (2, NODE), (3, NODE), (3, MIXED)])
@pytest.mark.parametrize("cases", [CASES[:7], CASES[7:]], ids=["first", "second"])
def test_programs(stage: int, budget: Any, cases: Any, tmp_path: Path) -> None:
    def run() -> dict[str, list[float]]:
        start()
        return {case.__name__: list(case(stage, budget, tmp_path)) for case in cases}

    for found in run_ranks(run, world_size=RANKS, env=NODES, timeout=380):
        assert {name: errors for name, errors in found.items() if any(errors)} == {}
