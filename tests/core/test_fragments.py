"""DeepSpeed's ``safe_get_*`` and ``safe_set_*`` against plain torch; gradients changed where they are local (N1)."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
)
from torch import nn

from tests.harness.beside import Beside, square_of
from tests.harness.data import noise
from tests.harness.engines import make_engine, rank, start
from tests.harness.extended import STAGES
from tests.harness.networks import two_layers
from tests.harness.oracle import Oracle, distance, full_parameters, value_of
from tests.harness.ranks import run_ranks
from tests.harness.rounding import excess
from zerosync_strategy import attach

SHARDED = {"stage3_param_persistence_threshold": 0}


data = noise(4, 6)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.03)


def loss_of(module: Any, k: int, of_rank: int) -> torch.Tensor:
    dtype = next(module.parameters()).dtype
    return module(data(k, of_rank).to(dtype)).float().square().mean()


class Both(Beside):
    def __init__(self, stage: int, zero: dict[str, Any] | None = None, half: bool = False, **options: Any) -> None:
        config = {"bf16": {"enabled": True}} if half else {}
        super().__init__(two_layers, adamw, loss_of, stage, zero, options, **config)
        self.pairs = list(zip(self.net.parameters(), self.plain.parameters(), strict=True))


@pytest.mark.extended(but=("3-options5",))
@pytest.mark.parametrize(
    ("stage", "options"),
    [(1, {}), (2, {}), (3, {}), (3, {"zero": SHARDED}), (2, {"coalesce": False}), (3, {"coalesce": False})],
)
def test_gradients(stage: int, options: dict[str, Any]) -> None:
    """Read after each of two backwards, and changed before the step, not linearly; after the step they are gone."""

    def run() -> Any:
        both, read = Both(stage, overlap_last=False, **options), 0.0
        for k in range(3):
            for m in range(2):
                both.backward(2 * k + m)
                if m == 0 and options.get("coalesce", True) is False:
                    continue  # to read them would close the window
                for (param, _), average in zip(both.pairs, both.oracle.gradients(), strict=True):
                    read = max(read, excess(safe_get_full_grad(param), average))
            both.zerosync.reduce()
            for param, _ in both.pairs:
                safe_set_full_grad(param, safe_get_full_grad(param).clamp(-0.01, 0.02))
            averages = both.oracle.gradients()
            both.oracle.ranks = [[average.clamp(-0.01, 0.02) for average in averages] for _ in range(2)]
            both.step()
            with pytest.raises(ValueError, match="no backward ran since the last optimizer step"):
                safe_get_full_grad(both.pairs[0][0])
        return read, both.error()

    for read, error in run_ranks(run):
        assert (read, error) == (0.0, 0.0)


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_changed_while_it_is_local(stage: int) -> None:
    def run() -> float:
        both = Both(stage, overlap_last=False)
        (first, _), *_ = both.pairs
        changes: list[Callable[[], Any]] = [
            lambda: first.grad.mul_(0.5),
            lambda: nn.utils.clip_grad_value_([first], 0.01),
            lambda: nn.utils.clip_grad_norm_([first], 0.01),
            lambda: setattr(first, "grad", torch.ones_like(first.grad)),
            lambda: safe_set_full_grad(first, torch.ones(6, 6)),
        ]
        for k, change in enumerate(changes):
            for follow in (both.engine.step, lambda: both.engine.backward(both.engine(data(0, 0)).mean())):
                both.engine.backward(both.engine(data(k, rank())).square().mean())
                if first.numel() or k != 3:  # torch itself refuses to give a sharded parameter another gradient
                    change()
                    with pytest.raises(
                        RuntimeError, match=r"'0.weight'.* was changed .*full_gradients\(\).*local_gradi"
                    ):
                        follow()
                both.engine.zero_grad()
        both.backward(0)
        with both.zerosync.local_gradients():
            first.grad.mul_(0.5)
        for grads in both.oracle.ranks:
            grads[0].mul_(0.5)  # type: ignore[union-attr]
        first_bias = both.pairs[1][0]
        first_bias.grad = None  # to drop a gradient is no change
        for grads in both.oracle.ranks:
            grads[1] = None
        both.step()
        return both.error()

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_shared_and_kept(stage: int) -> None:
    """Here it is scaled before it is sent, and in a bucket of one parameter it is sent as it lies."""

    def run() -> bool:
        net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)))
        zero = {**SHARDED, "reduce_bucket_size": 1, "reduce_scatter": False}
        engine = make_engine(net, adamw(net), stage, zero, gradient_predivide_factor=2.0)
        zerosync = attach(engine, overlap_last=False)
        engine.backward(engine(torch.full((2, 8), 1.0 + rank())).square().mean())
        first, second = net.parameters()
        with zerosync.local_gradients():
            first.grad = second.grad
        kept, before = second.grad, second.grad.clone()
        zerosync.reduce()
        return torch.equal(kept, before) and torch.equal(safe_get_full_grad(first), safe_get_full_grad(second))

    assert run_ranks(run) == [True, True]


@pytest.mark.extended(but=("persistent",))
@pytest.mark.parametrize("zero", [None, SHARDED], ids=["persistent", "sharded"])
def test_local_gradients_of_stage_3(zero: dict[str, Any] | None) -> None:
    def run() -> float:
        both = Both(3, zero)
        for k in range(3):
            both.backward(k)
            for access in (lambda p: safe_get_local_grad(p), lambda p: safe_set_local_grad(p, p.ds_tensor)):
                with pytest.raises(
                    RuntimeError,
                    match=r"safe_.et_local_grad\(\) .* each rank's own. .*after engine\.zerosync\.reduce\(\)",
                ):
                    access(both.pairs[0][0])
            both.zerosync.reduce()
            for param, _ in both.pairs:
                assert torch.equal(safe_get_local_grad(param), _part(safe_get_full_grad(param)))
                safe_set_local_grad(param, safe_get_local_grad(param).clamp(-0.01, 0.02))
            averages = both.oracle.gradients()
            both.oracle.ranks = [[average.clamp(-0.01, 0.02) for average in averages] for _ in range(2)]
            both.step()
        return both.error()

    assert run_ranks(run) == [0.0, 0.0]


def _part(full: torch.Tensor) -> torch.Tensor:
    return full.flatten().chunk(2)[rank()]


@pytest.mark.extended(but=("3-zero4-options4",))
@pytest.mark.parametrize(
    ("stage", "zero", "options"),
    [
        (1, None, {}), (2, None, {}), (3, None, {}), (3, SHARDED, {}), (3, SHARDED, {"param_memory_budget": "all"}),
        (2, None, {"half": True}), (3, SHARDED, {"half": True}),
    ],
)  # fmt: skip
def test_parameters_and_states(stage: int, zero: dict[str, Any] | None, options: dict[str, Any]) -> None:
    """Read between backward and step, and after the step; what is set counts at once."""

    def run() -> Any:
        both, read = Both(stage, zero, **options), 0.0

        def compare() -> None:
            nonlocal read
            for param, plain in both.pairs:
                found = [safe_get_full_fp32_param(param), safe_get_full_optimizer_state(param, "exp_avg")]
                expected = value_of(plain), both.oracle.state_of(plain, "exp_avg")
                read = max(read, *map(excess, found, expected))
                if stage == 3:
                    assert torch.equal(safe_get_local_fp32_param(param), _part(found[0]))
                    assert torch.equal(safe_get_local_optimizer_state(param, "exp_avg"), _part(found[1]))

        def change(k: int) -> None:
            for param, plain in both.pairs:
                value = plain.detach() * 0.5 + 0.1003
                if stage == 3 and k == 1:
                    safe_set_local_fp32_param(param, _part(value))
                else:
                    safe_set_full_fp32_param(param, value)
                plain.data.copy_(value)
                state = both.oracle.optimizer.state[plain]["exp_avg"]
                state.mul_(0.5)
                safe_set_full_optimizer_state(param, state, "exp_avg")

        both.backward(0)
        both.step()
        for k in range(3):
            compare()
            change(k)
            compare()
            both.backward(k)
            compare()
            change(k)
            compare()
            both.step()
        return read, both.error()

    for read, error in run_ranks(run):
        # In bf16, AdamW moves what is lost by a learning rate.
        assert max(read, error) <= (0.03 if options.get("half") else 0.0)


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
def test_a_shard_that_is_not_full(stage: int) -> None:
    """Of ten elements on four ranks, the last has one; of one, three ranks have none."""

    def run() -> float:
        start()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(10, 1))
        plain = copy.deepcopy(net)
        engine = make_engine(net, adamw(net), stage, SHARDED if stage == 3 else None)
        zerosync, oracle = attach(engine), Oracle(plain, adamw(plain), 4)
        inputs = noise(4, 10)
        for k in range(3):
            engine.backward(engine(inputs(k, rank())).square().mean())
            oracle.backward(lambda r, k=k: plain(inputs(k, r)).square().mean())
            zerosync.reduce()
            for param in net.parameters():
                safe_set_full_grad(param, safe_get_full_grad(param) * 0.5)
            engine.step()
            averages = oracle.gradients()
            oracle.ranks = [[average * 0.5 for average in averages] for _ in range(4)]
            oracle.step()
            for param, same in zip(net.parameters(), plain.parameters(), strict=True):
                value, state = value_of(same) + 1, oracle.state_of(same, "exp_avg") * 0.5
                same.data.copy_(value)
                oracle.optimizer.state[same]["exp_avg"].copy_(state)
                safe_set_full_fp32_param(param, value)
                safe_set_full_optimizer_state(param, state, "exp_avg")
        with pytest.raises(ValueError, match=r"of shape \(3,\) for a parameter of shape \(1,\)"):
            safe_set_full_fp32_param(net[0].bias, torch.ones(3))
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run, world_size=4) == [0.0] * 4


@pytest.mark.extended
@pytest.mark.parametrize("budget", [{"host": "1MiB"}, {"node": "all"}], ids=["host", "node"])
def test_what_is_set_between_two_backwards_is_in_the_copies(budget: dict[str, Any]) -> None:
    def run() -> float:
        both = Beside(
            two_layers, lambda net: torch.optim.SGD(net.parameters(), lr=0.1), square_of(noise(4, 6)), zero=SHARDED,
            options={"param_memory_budget": {"device": 0, **budget}, "node_size": 2}, ranks=4,
        )  # fmt: skip
        for _ in range(2):
            both.backward()
            for param, same in zip(both.net.parameters(), both.plain.parameters(), strict=True):
                same.data.mul_(0.5)
                safe_set_full_fp32_param(param, value_of(same))
            both.backward()
            both.step()
        return both.error()

    assert run_ranks(run, world_size=4) == [0.0] * 4
