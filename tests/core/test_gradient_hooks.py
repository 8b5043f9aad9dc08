"""Hooks that a program has on gradients: what the step uses is what they leave, whenever they were registered (N1)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import engines
from tests.harness.engines import rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach

WIDTH, BACKWARDS, STEPS = 8, 2, 4
Hooks = Callable[[Any, int], None]


class Net(nn.Module):
    """With a tied weight, which has gradients of two uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(torch.tanh(self.second(torch.tanh(self.first(x)))))


def loss_of(module: Any, k: int, of_rank: int) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * k + of_rank))
    return module(x).float().square().mean() / BACKWARDS


def mask(rows: slice) -> Callable[[Any], None]:
    def hook(param: Any) -> None:
        assert param.grad is not None  # as in plain torch
        param.grad[rows] = 0

    return hook


def replace(param: Any) -> None:
    param.grad = param.grad * (torch.arange(WIDTH, device=param.device) % 2)


def early(net: Net, step: int) -> None:
    """Before the engine, and on the gradient that comes in."""
    if step == -2:
        net.first.weight.register_post_accumulate_grad_hook(mask(slice(0, 3)))
        net.second.weight.register_hook(lambda grad: grad * 0.25)


def late(net: Net, step: int) -> None:
    """After attach(), on weights, a tied one among them, and a bias; several on one."""
    if step == -1:
        for param in (net.first.weight, net.second.weight, net.tied.bias):
            param.register_post_accumulate_grad_hook(mask(slice(0, 3)))
        net.first.weight.register_post_accumulate_grad_hook(replace)
        net.first.bias.register_hook(lambda grad: grad * 0.5)


def in_training(net: Net, step: int) -> None:
    """Between two steps, and gone again."""
    if step == 1:
        net.handles = [p.register_post_accumulate_grad_hook(mask(slice(2, 5))) for p in net.parameters()]
    elif step == 3:
        for handle in net.handles:
            handle.remove()


def clamp(net: Net, step: int) -> None:
    """What depends on the sum so far, as plain torch has it in a window that is reduced once."""

    def hook(param: Any) -> None:
        param.grad.clamp_(-0.01, 0.01)

    for param in net.parameters() if step == -1 else ():
        param.register_post_accumulate_grad_hook(hook)


def train(hooks: Hooks, stage: int, options: Any, announced: bool, raw: bool, config: Any) -> float:
    net, plain = Net(), Net()
    for each in (net, plain):
        hooks(each, -2)
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    engine = engines.make_engine(net, optimizer, stage, {"reduce_bucket_size": 2 * WIDTH * WIDTH, **zero}, **config)
    zerosync = attach(engine, **options)
    oracle = Oracle(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
    for each in (net, plain):
        hooks(each, -1)
    for step in range(STEPS):
        for each in (net, plain):
            hooks(each, step)
        for k in range(BACKWARDS * step, BACKWARDS * (step + 1)):
            if announced and k % BACKWARDS == BACKWARDS - 1:
                zerosync.window.expect_last()
            loss = loss_of(engine, k, rank())
            loss.backward() if raw else engine.backward(loss)
            oracle.backward(lambda r, k=k: loss_of(plain, k, r))
        engine.step()
        oracle.step()
    return distance(full_parameters(net), full_parameters(plain))


@pytest.mark.extended(
    but=(
        "2-options1-late",
        "3-options5-early",
    )
)
@pytest.mark.parametrize("hooks", [early, late, in_training])
@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (1, {}), (2, {}), (2, {"coalesce": False}), (2, {"grad_memory_budget": 4 * WIDTH * WIDTH}),
        (3, {}), (3, {"param_memory_budget": "all"}), (3, {"coalesce": False}),
    ],
)  # fmt: skip
def test_what_hooks_leave_is_stepped(stage: int, options: dict[str, Any], hooks: Hooks) -> None:
    def run() -> list[float]:
        how = [(True, False), (False, False), (True, True)]
        return [train(hooks, stage, options, announced, raw, {}) for announced, raw in how]

    for errors in run_ranks(run):
        assert errors == [0.0] * 3


@pytest.mark.extended
@pytest.mark.parametrize(("stage", "options"), [(1, {}), (2, {}), (3, {}), (3, {"param_memory_budget": "all"})])
def test_hooks_see_what_is_accumulated(stage: int, options: dict[str, Any]) -> None:
    def run() -> list[float]:
        return [train(clamp, stage, options, announced, False, {}) for announced in (True, False)]

    for errors in run_ranks(run):
        assert errors == [0.0, 0.0]


@pytest.mark.parametrize("stage", [2, 3])
def test_where_gradients_are_accumulated_in_fp32(stage: int) -> None:
    """A hook finds the gradient of its backward there. One that drops it drops what was accumulated, too."""

    def run() -> None:
        net = Net()
        config = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
        engine = engines.make_engine(net, torch.optim.SGD(net.parameters(), lr=0.5), stage, zero, **config)
        zerosync = attach(engine)

        def drop(param: Any) -> None:
            assert param.grad is not None
            param.grad = None

        net.first.weight.register_post_accumulate_grad_hook(mask(slice(0, 3)))
        net.first.bias.register_post_accumulate_grad_hook(drop)
        with zerosync.full_parameters():
            weight, bias = net.first.weight.detach().clone(), net.first.bias.detach().clone()
        for k in range(4):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * k + rank()))
            engine.backward(engine(x.bfloat16()).float().square().mean())
            if k % 2:
                engine.step()
        with zerosync.full_parameters():
            moved = (net.first.weight != weight).any(1)
            assert torch.equal(net.first.bias, bias)
        assert not moved[:3].any() and moved[3:].all()

    run_ranks(run)
