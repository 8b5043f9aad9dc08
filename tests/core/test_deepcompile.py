"""DeepCompile's graphs give their gradients to the window (rule E2). Its kernels are those of tests/harness."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.harness import deepcompile, engines
from tests.harness.engines import rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from tests.harness.reads import BACKWARDS, WIDTH, WORDS, Model, adamw, data
from zerosync_strategy import attach

STEPS = 3
SCHEDULES = {  # of DeepCompile's passes, by step; the default of stage 3 begins its second part at the sixth
    3: [(0, ["zero3_compile"]), (1, ["zero3_compile", "prefetch", "selective_gather"])],
    2: None,
    1: None,
}


class Small(nn.Module):
    """A tied table, a layer that no graph has, and one of which a graph and an eager frame each read a part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight
        self.eager, self.both = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    @torch._dynamo.disable
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(self.eager(x)), self.both.weight)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.between(self.both(self.table(words)))
        return F.cross_entropy(self.head(torch.tanh(x)), words)


def make_engine(model: nn.Module, stage: int = 3) -> Any:
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return engines.make_engine(model, adamw(model), stage, zero, compile={"deepcompile": True})


def train(engine: Any, mirror: Oracle, plain: nn.Module) -> float:
    for k in range(STEPS * BACKWARDS):
        engine.backward(engine(data(k, rank())) / BACKWARDS)
        mirror.backward(lambda r, k=k: plain(data(k, r)) / BACKWARDS)
        if k % BACKWARDS == BACKWARDS - 1:
            engine.step()
            mirror.step()
    return distance(full_parameters(engine.module), full_parameters(plain))


def run(
    make: Callable[[], nn.Module], stage: int, options: dict[str, Any], backend: str = "eager"
) -> tuple[float, Any]:
    handle = deepcompile.install()
    model, plain = make(), make()
    engine = make_engine(model, stage)
    zerosync = attach(engine, **options)
    engine.compile(backend=backend, schedule=SCHEDULES[stage])
    error = train(engine, Oracle(plain, adamw(plain)), plain)
    assert handle.reductions == 0
    assert (handle.gathers > 0) == (stage == 3)
    assert stage != 3 or not any(param.numel() for param in model.parameters())
    full = full_parameters(model)
    assert distance({name: tensor for name, tensor in zerosync.full_weights() if name in full}, full) == 0.0
    return error, zerosync.report


@pytest.mark.extended(but=("3-options1-2",))
@pytest.mark.parametrize(
    ("stage", "options", "reductions"),
    [(3, {}, 1), (3, {"coalesce": False}, 2), (2, {}, 1), (1, {"grad_memory_budget": 0}, 2)],
)
@pytest.mark.off_device("Dynamo compiles nothing there")
def test_equal_to_plain_torch_also_what_eager_frames_bring(stage: int, options: Any, reductions: int) -> None:
    for error, report in run_ranks(run, Small, stage, options, timeout=100):
        assert error == 0.0
        assert report.backwards == BACKWARDS
        assert report.reductions >= reductions if reductions > 1 else report.reductions == 1


@pytest.mark.extended
def test_exceptions_leave_nothing() -> None:
    class Fails(Small):
        fail = False

        @torch._dynamo.disable
        def between(self, x: torch.Tensor) -> torch.Tensor:
            y = F.linear(torch.tanh(self.eager(x)), self.both.weight)
            if self.fail:
                raise ArithmeticError
            return y

    def interrupted() -> float:
        deepcompile.install()
        model, plain = Fails(), Fails()
        engine, mirror = make_engine(model), Oracle(plain, adamw(plain))
        attach(engine)
        engine.compile(backend="eager", schedule=[(0, ["zero3_compile"])])
        for k in range(4):
            if k == 1:
                Fails.fail = True
                with pytest.raises(ArithmeticError):
                    engine(data(k, rank()))
                Fails.fail = False
            elif k == 2:
                loss = engine(data(k, rank()))
                loss.register_hook(lambda grad: 1 / 0)
                with pytest.warns(UserWarning, match="dropped"), pytest.raises(ZeroDivisionError):
                    engine.backward(loss)
            assert not any(param.numel() for param in model.parameters())
            engine.backward(engine(data(k, rank())))
            mirror.backward(lambda r, k=k: plain(data(k, r)))
            engine.step()
            mirror.step()
        return distance(full_parameters(model), full_parameters(plain))

    assert run_ranks(interrupted, timeout=100) == [0.0, 0.0]


@pytest.mark.off_device("it has the one checker of the process")
def test_refusals_leave_the_engine_as_it_was() -> None:
    def refused() -> None:
        deepcompile.install()
        engine, plain = make_engine(Small()), Small()
        for options, what in (
            ({"param_memory_budget": "all"}, "param_memory_budget"),
            ({"eager_frames": False}, "eager_frames"),
        ):
            zerosync = attach(engine, **options)
            with pytest.raises(ValueError, match=f"DeepCompile cannot be combined with '{what}'"):
                engine.compile(backend="eager")
            zerosync.detach()
        zerosync = attach(engine)
        assert train(engine, Oracle(plain, adamw(plain)), plain) == 0.0
        engine.destroy()
        engine = make_engine(Small())
        zerosync = attach(engine)
        engine.compile(backend="eager")
        with pytest.raises(RuntimeError, match="DeepCompile has compiled"):
            zerosync.detach()
        engine.destroy()
        engine = make_engine(Small())
        engine.compile(backend="eager")
        with pytest.raises(ValueError, match="after attach"):
            attach(engine)

    run_ranks(refused, timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("stop", ["", "break", "item"])
def test_every_kind_of_read(stop: str, backend: str) -> None:
    for error, report in run_ranks(run, lambda: Model(stop), 3, {}, backend, timeout=500):
        assert error <= (0.0 if backend == "eager" else 1e-5)  # inductor has functions of its own
        assert report.reductions == 1
