"""Optimizers and parameters that ZeRO would train wrongly are refused by name; which need whole parameters."""

from typing import Any

import deepspeed
import pytest
import torch
from accelerate.utils import DummyOptim
from transformers import optimization

from tests.core.test_attach import loss_of, make_engine, network, rank
from tests.harness.optimizers import ScheduleFree
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.optimizer.problems import kind_of, optimizer_problem


def made(name: str, base: type = torch.optim.SGD) -> Any:
    """An object of a class of that name, which another package might have."""
    cls = type(name, (base,), {"__init__": lambda self: None})
    return cls()


class NeedsClosure(torch.optim.AdamW):
    def step(self, closure: Any) -> Any:
        return super().step(closure)


def test_classes_that_need_whole_parameters() -> None:
    matrices = [torch.nn.Parameter(torch.ones(4, 3))]
    assert not kind_of(ScheduleFree(matrices)).needs_whole
    assert kind_of(ScheduleFree(matrices, whole=True)).needs_whole
    for cls in (torch.optim.Adafactor, optimization.Adafactor, torch.optim.Muon):
        assert kind_of(cls(matrices)).problem == "" and kind_of(cls(matrices)).needs_whole
        assert not kind_of(cls(matrices), elementwise=True).needs_whole
    assert not kind_of(torch.optim.AdamW(matrices)).needs_whole
    assert kind_of(torch.optim.AdamW(matrices), elementwise="whole").needs_whole

    class Soap(torch.optim.AdamW):  # by its name: no trial shows what may begin with larger parameters
        pass

    assert kind_of(Soap(matrices)).problem == "" and kind_of(Soap(matrices)).needs_whole


def test_what_no_rank_can_step() -> None:
    problem = kind_of(torch.optim.LBFGS.__new__(torch.optim.LBFGS)).problem
    assert "the optimizer LBFGS computes with all parameters" in problem and "Use AdamW, SGD" in problem
    assert "Mine, a kind of Adagrad, is replaced by DeepSpeed" in kind_of(made("Mine", torch.optim.Adagrad)).problem
    problem = kind_of(NeedsClosure.__new__(NeedsClosure)).problem
    assert "the optimizer NeedsClosure takes a closure in step(), but ZeRO steps it without" in problem
    for name in ("AdamW", "LambdaSGD", "Lion", "DeepSpeedCPUAdam", "PagedAdamW8bit", "AdaBelief"):
        assert kind_of(made(name)).problem == ""
    assert kind_of(DummyOptim([])).problem == ""  # stands for one that DeepSpeed makes, and has no step()


def initialize(stage: int, module: Any, optimizer: Any, **options: Any) -> Any:
    config = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    config |= {"train_micro_batch_size_per_gpu": 1}
    options |= {"config": config, "dist_init_required": False}
    return deepspeed.initialize(model=module, optimizer=optimizer, **options)[0]


def test_attach_refuses_what_deepspeed_lets_pass() -> None:
    def run() -> None:
        make_engine(1)  # and with it the process group
        module = network()
        for stage in (1, 3):
            engine = initialize(stage, module := network(), torch.optim.LBFGS(module.parameters()))
            with pytest.raises(ValueError, match="LBFGS computes with all parameters"):
                attach(engine)
        module = network().append(torch.nn.Linear(8, 8, dtype=torch.complex64))
        engine = initialize(2, module, torch.optim.SGD(module.parameters(), lr=0.1))
        with pytest.raises(
            ValueError, match=r"complex: 0\.weight, .*3\.weight and 1 more.* where one is.*view_as_complex"
        ):
            attach(engine)

        module = network().append(torch.nn.Sequential(torch.nn.EmbeddingBag(8, 8, max_norm=1.0)))
        engine = initialize(3, module, torch.optim.SGD(module.parameters(), lr=0.1))
        with pytest.raises(ValueError, match=r"embeddings have max_norm: 3\.0\..*renorm\(2, 0, max_norm\)"):
            attach(engine)
        module = network().append(torch.nn.Embedding(8, 8, sparse=True))
        engine = initialize(2, module, torch.optim.SGD(module.parameters(), lr=0.1))
        with pytest.raises(ValueError, match=r"embeddings have sparse=True: 3\..*Leave sparse=True out"):
            attach(engine)

        optimizer = torch.optim.SGD((module := network()).parameters(), lr=0.1)
        assert optimizer_problem(module, optimizer) == ""
        attach(engine := initialize(1, module, optimizer))
        engine.backward(loss_of(engine, 0, rank()))
        engine.step()
        assert "has been given to an engine before" in optimizer_problem(module, optimizer)

    run_ranks(run)


def _with_an_empty_group(module: torch.nn.Module, last_rate: float) -> torch.optim.Optimizer:
    first, *others = module.parameters()
    return torch.optim.SGD(
        [{"params": [first], "lr": 0.4}, {"params": [], "lr": 0.1}, {"params": others, "lr": last_rate}], lr=0.1
    )


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", [2, 3])
def test_schedulers_go_without_groups_that_deepspeed_has_dropped(stage: int) -> None:
    """One that the engine steps, or the program; an error where rates do not say which group was empty."""

    def run() -> Any:
        make_engine(1)
        of, found = torch.optim.lr_scheduler, []
        for given in (True, False):
            optimizer = _with_an_empty_group(module := network(), 0.2)
            scheduler = of.LambdaLR(optimizer, [lambda step: 0.5**step, lambda _: 1.0, lambda step: 0.25**step])
            engine = initialize(stage, module, optimizer, lr_scheduler=scheduler if given else None)
            attach(engine)
            engine.backward(loss_of(engine, 0, rank()))
            engine.step()
            if not given:
                scheduler.step()
            found.append([group["lr"] for group in engine.optimizer.param_groups])
            engine.destroy()
        optimizer = _with_an_empty_group(module := network(), 0.1)
        scheduler = of.LambdaLR(optimizer, [lambda _: 0.5, lambda _: 1.0, lambda _: 0.25])
        with pytest.raises(ValueError, match=r"scheduler LambdaLR was made for 3 groups .* kept the 2 that have"):
            attach(initialize(stage, module, optimizer))
        return found

    assert run_ranks(run) == [[pytest.approx([0.2, 0.05])] * 2] * 2


class Rows(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(6, 4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(rows, self.weight, sparse=True).square().mean()


def test_a_sparse_gradient_of_a_function_is_refused() -> None:
    def run() -> None:
        make_engine(1)
        for stage in (2, 3):
            engine = initialize(stage, module := Rows(), torch.optim.SGD(module.parameters(), lr=0.1))
            attach(engine)
            with pytest.raises(ValueError, match=r"a sparse gradient, of a parameter of shape \(6, 4\)"):
                engine.backward(engine(torch.tensor([0, rank()])))

    run_ranks(run)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_foreign_parameter_on_the_rank_where_deepspeed_starts(stage: int) -> None:
    """DeepSpeed finds it on the rank that keeps it, the last, and nothing on the others, which would wait for that."""

    def run() -> None:
        make_engine(1)
        optimizer = torch.optim.SGD([*(module := network()).parameters(), torch.nn.Parameter(torch.ones(3))], lr=0.1)
        engine = initialize(stage, module, optimizer)
        attach(engine)

    first, last = run_ranks(run, expect="any")
    assert (first.error, last.error) == ("ValueError", "KeyError")
    assert "not in the Sequential: number 4 of group 0 with shape (3,)" in first.message
