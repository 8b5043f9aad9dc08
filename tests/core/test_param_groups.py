"""An optimizer's groups show the module's parameters, and its states are those of shards: what programs do with both.

It means what it means in plain torch, or it is an error with a remedy (N1).
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state
from torch import nn

from tests.harness.engines import make_engine, rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def adam(module: nn.Module) -> torch.optim.Optimizer:
    decays = [param for param in module.parameters() if param.dim() > 1]
    others = [param for param in module.parameters() if param.dim() <= 1]
    return torch.optim.AdamW([{"params": decays}, {"params": others, "weight_decay": 0.0}], lr=0.01, eps=1e-6)


def made(stage: int) -> tuple[Any, Any]:
    module = net()
    engine = make_engine(module, adam(module), stage, {"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    return engine, attach(engine)


def batch(step: int, of_rank: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + of_rank))


@pytest.mark.extended(
    but=(
        "1",
        "3",
    )
)
@STAGES
def test_groups_have_the_modules_parameters(stage: int) -> None:
    """Before, between and after backward and step; a gradient that has gone from its parameter says what to do."""

    def run() -> float:
        engine, zerosync = made(stage)
        plain = net()
        oracle = Oracle(plain, adam(plain))

        def given() -> list[Any]:
            return [param for group in engine.optimizer.param_groups for param in group["params"]]

        assert {id(param) for param in given()} == {id(param) for param in engine.module.parameters()}
        for step in range(3):
            zerosync.window.expect_last()
            engine.backward(engine(batch(step, rank())).square().mean())
            oracle.backward(lambda of, step=step: plain(batch(step, of)).square().mean())
            for param in given():
                with pytest.raises(RuntimeError, match=r"A gradient was used between .*full_gradients\(\)"):
                    param.grad.clamp_(-0.01, 0.01)
                with pytest.raises(RuntimeError, match=r"A gradient was used between"):
                    param.grad.zero_()
            with zerosync.full_gradients():
                for param in given():
                    param.grad.mul_(0.5)
            for grads in oracle.ranks:
                for grad in grads:
                    grad.mul_(0.5)
            given()
            if step == 1:  # in the next window, as in one that is dropped
                engine.zero_grad()
                zerosync.window.expect_last()
                engine.backward(engine(batch(step, rank())).square().mean())
                given()
                engine.backward(engine(batch(step, rank())).square().mean() * 0.0)
                oracle.zero_grad()
                oracle.backward(lambda of, step=step: plain(batch(step, of)).square().mean())
            engine.step()
            oracle.step()
            assert all(param.grad is None for param in given())
        with pytest.raises(ValueError, match=r"\['params'\] was to be replaced"):
            engine.optimizer.param_groups[0]["params"] = []
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.5
        assert [group["lr"] for group in engine.optimizer.optimizer.param_groups] == [0.5, 0.5]
        zerosync.detach()
        assert {id(param) for param in given()} != {id(param) for param in engine.module.parameters()}
        return distance(full_parameters(engine.module), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended(but=("1",))
@STAGES
def test_states_of_a_parameter(stage: int, tmp_path: Path) -> None:
    """Asked for by parameter they are an error; by the functions that it names, and all together, they are reset."""

    def run() -> float:
        engine, zerosync = made(stage)
        plain = net()
        oracle, params = Oracle(plain, adam(plain)), list(engine.module.parameters())

        def train(step: int) -> None:
            engine.backward(engine(batch(step, rank())).square().mean())
            oracle.backward(lambda of: plain(batch(step, of)).square().mean())
            engine.step()
            oracle.step()

        train(0)
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
        states = engine.optimizer.state
        for ask in (
            lambda key: states[key], lambda key: key in states, states.get, lambda key: states.pop(key, None),
        ):  # fmt: skip
            with pytest.raises(
                RuntimeError, match=r"'0\.weight'\. .* safe_set_full_optimizer_state\(param, value, key"
            ):
                ask(params[0])
        states[params[0]] = {}
        with pytest.raises(RuntimeError, match=r"'0\.weight'"):
            engine.save_checkpoint(tmp_path)
        del states[params[0]]
        for param, of_oracle in zip(params, plain.parameters(), strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                value = safe_get_full_optimizer_state(param, key)
                safe_set_full_optimizer_state(param, value * 0.5, key)
                oracle.optimizer.state[of_oracle][key].mul_(0.5)
        train(1)
        for state in engine.optimizer.state.values():
            state["exp_avg"].zero_()
        for state in oracle.optimizer.state.values():
            state["exp_avg"].zero_()
        train(2)
        error = distance(full_parameters(engine.module), full_parameters(plain))
        zerosync.detach()
        assert params[0] not in engine.optimizer.state
        return error

    assert run_ranks(run) == [0.0, 0.0]
