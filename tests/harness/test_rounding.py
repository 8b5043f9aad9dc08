"""The bounds of comparisons: another order of the sums is within them, and what is wrong is not."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.harness.oracle import Oracle, distance, full_parameters, of_trained
from tests.harness.problem import Data, adamw, loss_of, network, sgd
from tests.harness.ranks import run_ranks
from tests.harness.rounding import RoundedOtherwise, excess

STEPS, BACKWARDS = 4, 3


def train(
    optimizer: Callable[..., torch.optim.Optimizer], loss_of_rank: Callable[[nn.Module, int, int], torch.Tensor]
) -> tuple[nn.Module, Oracle]:
    net = network()
    oracle = Oracle(net, optimizer(net.parameters()))
    oracle.train(lambda *of: loss_of_rank(*of) / BACKWARDS, STEPS, BACKWARDS)
    return net, oracle


DATA = Data(STEPS * BACKWARDS)


def whole(net: nn.Module, k: int, rank: int) -> torch.Tensor:
    return loss_of(net, DATA.batch(k, rank))


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_other_orders_are_within(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    """Of the samples, of the products, in two roundings instead of one, and in fp64."""

    def by_sample(net: nn.Module, k: int, rank: int) -> torch.Tensor:
        x, y = DATA.batch(k, rank)
        return sum(loss_of(net, (x[i : i + 1], y[i : i + 1])) for i in reversed(range(len(x)))) / len(x)

    def by_products(net: nn.Module, k: int, rank: int) -> torch.Tensor:
        x, y = DATA.batch(k, rank)
        for layer in net:
            if isinstance(layer, nn.Linear):
                x = (x.flip(1)[:, None] * layer.weight.flip(1)).sum(2) + layer.bias
            else:
                x = layer(x)
        return (x - y).square().mean()

    def in_double(net: nn.Module, k: int, rank: int) -> torch.Tensor:
        x, y = DATA.batch(k, rank)
        params = {name: param.double() for name, param in net.named_parameters()}
        return (torch.func.functional_call(net, params, x.double()) - y).square().mean().float()

    def run() -> None:
        expected = full_parameters(train(optimizer, whole)[0])
        assert all(0 < value.rounding < 1e-5 for value in expected.values())
        for other in (by_sample, by_products, in_double):
            found = full_parameters(train(optimizer, other)[0])
            assert any(not torch.equal(found[name], expected[name]) for name in found), other
            assert distance(found, expected) == 0.0, other

    run_ranks(run, world_size=1)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_what_is_wrong_is_beyond(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    """One micro-batch of one rank, in one step, is left out, is off by 1e-3 or is rounded to bf16."""
    wrong: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "left out": lambda loss: 0 * loss,
        "off by 1e-3": lambda loss: 1.001 * loss,
        "in bf16": lambda loss: loss,
    }

    def run() -> None:
        expected = full_parameters(train(optimizer, whole)[0])
        for what, change in wrong.items():

            def changed(net: nn.Module, k: int, rank: int, what: str = what, change: Callable = change) -> torch.Tensor:
                if (k, rank) != (4, 1):
                    return whole(net, k, rank)
                x, y = DATA.batch(k, rank)
                return change(loss_of(net, (x.bfloat16().float() if what == "in bf16" else x, y)))

            found = full_parameters(train(optimizer, changed)[0])
            assert distance(found, expected) > 1e-6, what

    run_ranks(run, world_size=1)


def test_what_is_exact_stays_so() -> None:
    """Small whole numbers, copies, comparisons; in place and out of place; and what no oracle has trained."""

    def compute() -> list[torch.Tensor]:
        x = torch.arange(12.0).view(3, 4)
        y = x @ x.T + 1
        y.add_(x.sum()).mul_(0.5)
        return [y, x.t().clone(), (y > 3).float(), torch.cat([x, x]).cumsum(0), x.double() / 3]

    with RoundedOtherwise():
        otherwise = compute()
    assert all(torch.equal(*pair) for pair in zip(compute(), otherwise, strict=True))
    with RoundedOtherwise():
        third, tenth = torch.ones(3) / 3, torch.ones(3)
        tenth.div_(10)
    assert not torch.equal(third, torch.ones(3) / 3) and not torch.equal(tenth, torch.ones(3) / 10)
    assert excess(torch.ones(3) / 3, third) > 0.0 and excess(third, third) == 0.0


def test_what_is_computed_of_trained_parameters() -> None:
    def run() -> None:
        net, oracle = train(adamw, whole)
        x = torch.ones(1, 16)
        out = of_trained(net, lambda: net(x))
        assert 0 < out.rounding < 1e-5 and torch.equal(out, net(x))
        assert excess(out + 4 * out.rounding, out) == 0.0 and excess(out + 1e-3, out) > 0.0
        state = oracle.state_of(net[0].weight, "exp_avg")
        assert 0 < state.rounding < 1e-5 and torch.equal(state, oracle.optimizer.state[net[0].weight]["exp_avg"])

    run_ranks(run, world_size=1)
