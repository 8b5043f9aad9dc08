"""Optimizers on no list: whether they may step flat shards is found out by stepping copies of them."""

import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.harness.engines import make_engine
from tests.harness.oracle import distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.failures.errors import CheckpointError
from zerosync_strategy.core.optimizer import problems
from zerosync_strategy.core.optimizer.probe import Scope, probe
from zerosync_strategy.core.optimizer.problems import kind_of


class Plain(torch.optim.Optimizer):
    """SGD with what a subclass does to each gradient; its constructor keeps an argument that no group has."""

    def __init__(self, params: Any, period: int, **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, **options})
        self.period = period
        print("an advertisement")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        grads = [param.grad for group in self.param_groups for param in group["params"]]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                param.add_(self.changed(param, grads, state["step"]), alpha=-group["lr"])

    def changed(self, param: Any, grads: list[Any], step: int) -> Any:
        return param.grad


class Centralized(Plain):  # as Ranger
    def changed(self, param: Any, grads: list[Any], step: int) -> Any:
        return param.grad - param.grad.mean(-1, keepdim=True) if param.dim() > 1 else param.grad


class LateNorm(Plain):  # as what projects in every period-th step
    def changed(self, param: Any, grads: list[Any], step: int) -> Any:
        return param.grad if step % self.period else param.grad / param.grad.norm()


class Clipped(Plain):
    def changed(self, param: Any, grads: list[Any], step: int) -> Any:
        return param.grad * min(1.0, 500 / float(param.grad.norm()))


class Projected(Plain):  # as AdamP: where the gradient is orthogonal to the weights
    def changed(self, param: Any, grads: list[Any], step: int) -> Any:
        along = torch.nn.functional.cosine_similarity(param.flatten(), param.grad.flatten(), dim=0)
        return param.grad * (0.5 if abs(along) < 1e-3 else 1)


class GlobalNorm(Plain):
    def changed(self, param: Any, grads: list[Any], step: int) -> Any:
        return param.grad / torch.stack([grad.norm() for grad in grads]).norm()


class Noisy(Plain):
    def changed(self, param: Any, grads: list[Any], step: int) -> Any:
        random.random()
        return param.grad + 0.1 * torch.randn_like(param)


class NoisyByNumpy(Plain):
    def changed(self, param: Any, grads: list[Any], step: int) -> Any:
        return param.grad * numpy.random.random()


class Factored(Plain):  # as Shampoo, with a matrix for each dimension
    def changed(self, param: Any, grads: list[Any], step: int) -> Any:
        assert max(param.shape) < 1000, "would take minutes"
        for dim in range(param.dim()):
            rows = param.grad.movedim(dim, 0).flatten(1)
            param.grad = (param.grad.movedim(dim, -1) @ (rows @ rows.T)).movedim(-1, dim)
        return param.grad / param.grad.abs().max()


class NormOfAllOnceLarge(Factored):  # what small parameters do not show
    def changed(self, param: Any, grads: list[Any], step: int) -> Any:
        if sum(grad.numel() for grad in grads) < 1000:
            return super().changed(param, grads, step)
        return GlobalNorm.changed(self, param, grads, step)


class MatricesOnly(Plain):  # as Muon
    def changed(self, param: Any, grads: list[Any], step: int) -> Any:
        assert param.dim() == 2, "takes matrices"
        return param.grad


class MadeWithStates(Plain):  # states that the constructor makes are lost with the parameters
    def __init__(self, params: Any, period: int) -> None:
        super().__init__(params, period)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["sum"] = torch.zeros_like(param)

    def changed(self, param: Any, grads: list[Any], step: int) -> Any:
        return self.state[param]["sum"].add_(param.grad)


class Lookahead(torch.optim.Optimizer):
    """A wrapper, as pytorch_optimizer has it: slow weights beside those of another optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state = {param: {"slow": param.clone()} for group in self.param_groups for param in group["params"]}

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["slow"].lerp_(param, 0.5)


class SAM(torch.optim.Optimizer):
    def __init__(self, params: Any, base: type) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base_optimizer = base(self.param_groups, lr=0.1)

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "SAM requires a closure"


class OwnPart(Plain):  # as MuonWithAuxAdam: each rank steps some parameters, and gets the others
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in enumerate(params if dist.is_initialized() else ()):
            if index % dist.get_world_size() == dist.get_rank():
                param.data.sub_(param.grad, alpha=0.1)
            dist.broadcast(param.data, index % dist.get_world_size())


class Noted(Plain):  # as Moonlight's Muon, whose constructor notes how each parameter is stepped
    def __init__(self, params: Any, period: int) -> None:
        super().__init__(params, period)
        for param in self.param_groups[0]["params"]:
            self.state[param]["kind"] = "matrix" if param.dim() > 1 else "other"

    def changed(self, param: Any, grads: list[Any], step: int) -> Any:
        assert self.state[param]["kind"] in ("matrix", "other")
        return param.grad


class Seeded(Plain):  # as APOLLO, whose constructor numbers the parameters, for random projections
    def __init__(self, params: Any, period: int) -> None:
        super().__init__(params, period)
        for number, param in enumerate(self.param_groups[0]["params"]):
            self.state[param]["seed"] = number

    def changed(self, param: Any, grads: list[Any], step: int) -> Any:
        generator = torch.Generator().manual_seed(self.state[param]["seed"])
        return param.grad * torch.randn(param.shape, generator=generator)


class Counted(Plain):  # as SPAM, which keeps its own count among the states of parameters
    def __init__(self, params: Any, period: int) -> None:
        super().__init__(params, period)
        self.state["steps"] = 0  # type: ignore[index]

    def step(self, closure: Any = None) -> None:
        super().step()
        self.state["steps"] += 1  # type: ignore[index]


class InBackward(torch.optim.Optimizer):  # as LOMO
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 8))


def test_what_a_trial_finds() -> None:
    params = list(network().parameters())
    expected = {
        Plain: Scope.ELEMENT, Centralized: Scope.PARAMETER, LateNorm: Scope.PARAMETER, Clipped: Scope.PARAMETER,
        Projected: Scope.PARAMETER, MatricesOnly: Scope.PARAMETER, GlobalNorm: Scope.EVERYTHING, Noisy: Scope.CHANCE,
        MadeWithStates: Scope.UNKNOWN, NoisyByNumpy: Scope.CHANCE, Factored: Scope.PARAMETER,
        NormOfAllOnceLarge: Scope.EVERYTHING, Noted: Scope.PARAMETER,
        Seeded: Scope.PARAMETER,
    }  # fmt: skip
    assert {cls: probe(cls(params, 20)).scope for cls in expected} == expected
    assert probe(LateNorm(params, 2000)).scope is Scope.ELEMENT  # not in the first 256 steps


def test_its_own_options_count_and_the_learning_rate_does_not() -> None:
    class Grouped(Plain):
        def step(self, closure: Any = None) -> None:
            super().step()
            for group in self.param_groups:
                for param in group["params"] if group["normed"] else ():
                    param.data /= 1 + param.data.norm()

    weight, bias = torch.nn.Linear(4, 4).parameters()
    groups = [{"params": [weight]}, {"params": [bias], "normed": True}]
    assert probe(Grouped([weight, bias], 2, normed=False)).scope is Scope.ELEMENT
    assert probe(Grouped(groups, 2, normed=False)).scope is Scope.PARAMETER
    optimizer = Centralized([weight], 2)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)
    assert probe(optimizer).scope is Scope.PARAMETER


@pytest.mark.extended(but=("options2",))
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"amsgrad": True, "maximize": True}])
def test_torch_optimizers_that_are_elementwise(options: dict[str, bool]) -> None:
    class Mine(torch.optim.AdamW):
        pass

    assert probe(Mine(network().parameters(), lr=1e-3, **options)).scope is Scope.ELEMENT


def test_a_trial_leaves_no_trace(capfd: pytest.CaptureFixture[str]) -> None:
    params = list(network().parameters())
    optimizer = Noisy(params, 3)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # it wraps step()
    calls: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("own"))
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("everyone's"))
    values, states = [param.detach().clone() for param in params], repr(optimizer.state_dict())
    before, of_numpy = (torch.get_rng_state(), random.getstate()), repr(numpy.random.get_state())
    capfd.readouterr()
    assert probe(optimizer).scope is Scope.CHANCE
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert repr(numpy.random.get_state()) == of_numpy
    assert capfd.readouterr() == ("", "") and calls == []
    assert all(map(torch.equal, values, params)) and repr(optimizer.state_dict()) == states
    optimizer.step()
    handle.remove()
    assert calls == ["own", "everyone's"]


def test_errors_say_what_was_found() -> None:
    params = list(network().parameters())
    for cls in (Centralized, MatricesOnly):
        assert kind_of(cls(params, 2)).problem == "" and kind_of(cls(params, 2)).needs_whole
    assert "raises AssertionError: takes matrices" in probe(MatricesOnly(params, 2)).detail
    problem = kind_of(GlobalNorm(params, 2)).problem
    assert "the optimizer GlobalNorm computes with all parameters at once, but ZeRO" in problem
    assert "times the largest update of a parameter of shape (8, 10)" in problem
    assert "Use AdamW, SGD" in problem and "elementwise_optimizer=True" in problem
    assert "Noisy draws random numbers" in kind_of(Noisy(params, 2)).problem
    assert "KeyError: 'sum'" in kind_of(MadeWithStates(params, 2)).problem
    assert "Counted could not step a copy of itself" in kind_of(Counted(params, 2)).problem
    assert "Lookahead could not step a copy of itself" in kind_of(Lookahead(torch.optim.SGD(params, lr=0.1))).problem
    assert "SAM could not step" in kind_of(SAM(params, torch.optim.SGD)).problem
    assert "SAM requires a closure" in kind_of(SAM(params, torch.optim.SGD)).problem
    assert "InBackward has no step(): it updates parameters in the backward" in kind_of(InBackward(params)).problem
    for cls in (Centralized, Noisy, MadeWithStates, Counted):
        assert kind_of(cls(params, 2), elementwise=True).problem == ""


def test_attach_tries_it() -> None:
    def run() -> None:
        for stage in (1, 3):
            engine = make_engine(module := network(), GlobalNorm(module.parameters(), 2), stage)
            with pytest.raises(ValueError, match="GlobalNorm computes with all parameters"):
                attach(engine)
            attach(engine, elementwise_optimizer=True)
            engine = make_engine(module := network(), OwnPart(module.parameters(), 2), stage)
            with pytest.raises(ValueError, match=r"OwnPart exchanges with other ranks .*\(c10d::broadcast_\)"):
                attach(engine)

            with patch.object(problems, "probe", side_effect=probe) as trials:
                attach(make_engine(module := network(), Centralized(module.parameters(), 2), stage))
            assert trials.call_count == 1

    run_ranks(run)


@pytest.mark.extended(but=("3-whole",))
@pytest.mark.parametrize("how", [True, "whole"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_that_are_of_no_parameter(stage: int, how: Any, tmp_path: Path) -> None:
    """They stay with the optimizer, and are in DeepSpeed's checkpoints."""

    def run() -> Any:
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
        plain = network()
        optimizer: Any = Counted(plain.parameters(), 2)
        for step in range(4):
            plain(inputs + step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for first in (0, 2):
            optimizer = Counted((module := network()).parameters(), 2)
            engine = make_engine(module, optimizer, stage)
            with pytest.raises(ValueError, match="found an optimizer with states that are of no parameter"):
                attach(engine, elementwise_optimizer=how, checkpoint_format="distributed")
            attach(engine, elementwise_optimizer=how)
            if first:
                engine.load_checkpoint(str(tmp_path))
            for step in range(first, first + 2):
                engine.backward(engine(inputs + step).square().mean())
                engine.step()
            engine.save_checkpoint(str(tmp_path))
        engine = make_engine(model := network(), late := Plain(model.parameters(), 2), stage)
        attach(engine, elementwise_optimizer=how, checkpoint_format="distributed")
        late.state["steps"] = 0  # type: ignore[index]
        with pytest.raises(CheckpointError, match="found an optimizer with states that are of no parameter"):
            engine.save_checkpoint(str(tmp_path), "late")
        return distance(full_parameters(module), full_parameters(plain)), optimizer.state["steps"]

    assert run_ranks(run) == [(0.0, 4)] * 2
