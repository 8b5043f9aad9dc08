"""Schedule-free optimizers: `train()` and `eval()` exchange the parameters on all ranks, as in plain torch."""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param

from tests.harness.data import noise
from tests.harness.engines import make_engine, rank
from tests.harness.extended import VALUES
from tests.harness.masters import Masters
from tests.harness.networks import stack
from tests.harness.optimizers import ScheduleFree
from tests.harness.oracle import Oracle, distance, full_parameters, of_trained
from tests.harness.ranks import run_ranks
from tests.harness.rounding import excess
from zerosync_strategy import attach

WIDTH, LAYERS, STEPS = 6, 3, 6
data = noise(4, WIDTH)
SMALL = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 100}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
IN_NODE = {"device": 0, "node": "all"}
NODE = {"node_size": 2, "param_memory_budget": IN_NODE, "grad_memory_budget": IN_NODE}


def of_package(name: str, **options: Any) -> Any:
    """A class of the package schedulefree, where that is installed."""
    installed = importlib.util.find_spec("schedulefree") is not None

    def make(groups: Any) -> Any:
        return getattr(importlib.import_module("schedulefree"), name)(groups, lr=0.05, **options)

    marks = pytest.mark.skipif(not installed, reason="needs the package schedulefree")
    return pytest.param(2, 3, {}, SMALL, make, marks=marks, id=name)


def whole(groups: Any) -> ScheduleFree:
    return ScheduleFree(groups, whole=True)


def groups_of(module: torch.nn.Module) -> list[dict[str, Any]]:
    params = list(module.parameters())
    return [{"params": [p for p in params if p.dim() > 1]}, {"params": [p for p in params if p.dim() < 2], "lr": 0.02}]


def loss_of(module: Any, k: int, of_rank: int) -> torch.Tensor:
    x = data(k, of_rank).to(next(module.parameters()).dtype)
    return (module(x).float() - 0.3).square().mean()


@pytest.mark.extended(
    but=(
        "2-3-options6-zero6-ScheduleFree",
        "AdamWScheduleFree",
        "SGDScheduleFree",
        "RAdamScheduleFree",
        "AdamWScheduleFreeReference",
    )
)
@pytest.mark.parametrize(
    ("ranks", "stage", "options", "zero", "make"),
    [
        (2, 1, {}, {}, ScheduleFree),
        (3, 2, {"coalesce": False}, SMALL, ScheduleFree),
        (2, 2, {"grad_memory_budget": 200}, OFFLOAD, ScheduleFree),
        (2, 3, {}, {}, ScheduleFree),  # all parameters are persistent
        (2, 3, {"param_memory_budget": "all"}, SMALL, ScheduleFree),
        (2, 3, {"param_memory_budget": {"device": 200, "host": "all"}}, {**SMALL, "sub_group_size": 30}, ScheduleFree),
        (2, 3, {}, {**OFFLOAD, **SMALL}, ScheduleFree),
        (4, 3, NODE, SMALL, ScheduleFree),
        (4, 2, {"node_size": 2}, SMALL, ScheduleFree),
        (2, 2, {}, SMALL, whole),
        (2, 3, {"param_memory_budget": "all"}, SMALL, whole),
        of_package("AdamWScheduleFree"),
        of_package("SGDScheduleFree", momentum=0.6),
        of_package("RAdamScheduleFree"),
        of_package("AdamWScheduleFreeReference"),
    ],
)
def test_training_and_evaluation(ranks: int, stage: int, options: Any, zero: Any, make: Callable[..., Any]) -> None:
    """A program that evaluates before the first step, between steps and within one; it edits, freezes and thaws."""

    def run() -> list[float]:
        net, plain = stack(WIDTH, LAYERS), stack(WIDTH, LAYERS)
        optimizer = make(groups_of(net))
        engine, oracle = make_engine(net, optimizer, stage, zero), Oracle(plain, make(groups_of(plain)), ranks)
        zerosync = attach(engine, **options)
        errors = []

        def switch(mode: str, through: Any = optimizer) -> None:
            getattr(through, mode)()
            oracle.switch(mode)
            expected = of_trained(plain, lambda: plain(data(99, rank())))
            with torch.no_grad():
                errors.append(excess(engine(data(99, rank())), expected))
            errors.append(distance(full_parameters(net), full_parameters(plain)))

        def freeze(layer: int, frozen: bool) -> None:
            for module in (net, plain):
                module[layer].requires_grad_(not frozen)

        freeze(1, True)
        switch("eval")
        for step in range(STEPS):
            freeze(1, step < 2)
            freeze(2, step in (3, 4))
            switch("train", engine.optimizer if step % 2 else optimizer)
            for k in (2 * step, 2 * step + 1):
                optimizer.train()  # changes nothing
                engine.backward(loss_of(engine, k, rank()))
                oracle.backward(lambda r, k=k: loss_of(plain, k, r))
                if step == 2:
                    switch("eval")
                    switch("train")
            engine.step()
            oracle.step()
            if step != 1:
                switch("eval", engine.optimizer)
            if step == 4:
                for module in (net, plain):
                    module[0][0].weight.data.clamp_(-0.2, 0.2)
        assert zerosync.report.step == STEPS
        return errors

    for errors in run_ranks(run, world_size=ranks):
        assert len(errors) > 20 and set(errors) == {0.0}, errors


@pytest.mark.extended
@pytest.mark.parametrize(
    ("stage", "options", "zero"),
    [
        (1, {}, SMALL),
        (2, {}, OFFLOAD),
        (3, {"param_memory_budget": "all"}, SMALL),
        (3, {"param_memory_budget": {"device": 100, "host": "all"}}, {**OFFLOAD, **SMALL}),
    ],
)
def test_in_16_bits(stage: int, options: Any, zero: Any) -> None:
    """fp32 weights are exchanged, and the module has them rounded.

    Gradients round otherwise than plain torch's, which moves the weights by less than a half of how far y and x are
    apart. Without the exchange, they would be off by all of that.
    """

    def run() -> list[float]:
        net = stack(WIDTH, LAYERS)
        oracle = Masters(stack(WIDTH, LAYERS), torch.bfloat16, ScheduleFree)
        optimizer = ScheduleFree(net.parameters())
        engine = make_engine(net, optimizer, stage, zero, bf16={"enabled": True})
        attach(engine, **options)
        off: list[float] = []

        def switch(mode: str) -> None:
            before = [master.detach().clone() for master in oracle.masters]
            getattr(optimizer, mode)()
            oracle.switch(mode)
            with torch.no_grad():
                engine(data(99, rank()).bfloat16())  # holds what is held
            values = full_parameters(net)
            for (name, param), right, other in zip(net.named_parameters(), oracle.masters, before, strict=True):
                master = safe_get_full_fp32_param(param)
                assert torch.equal(values[name], master.bfloat16().float())
                off.append(float((master - right).norm() / (right - other).norm()))

        optimizer.train()
        oracle.switch("train")
        for step in range(STEPS):
            ks = (2 * step, 2 * step + 1)
            for k in ks:
                engine.backward(loss_of(engine, k, rank()))
            engine.step()
            oracle.step(loss_of, ks)
            if step > 1:
                switch("eval")
                switch("train")
        return off

    for off in run_ranks(run):
        assert len(off) == 2 * LAYERS * 2 * (STEPS - 2) and max(off) < 0.5, off


@pytest.mark.extended(but=VALUES)
@pytest.mark.parametrize(("stage", "make"), [(2, ScheduleFree), (3, ScheduleFree), (2, whole), (3, whole)])
@pytest.mark.parametrize("saved", ["train", "eval"])
def test_a_checkpoint_has_the_mode_in_which_it_is_saved(
    tmp_path: Path, stage: int, make: Callable[..., Any], saved: str
) -> None:
    """Training and evaluation go on as plain torch's, in a new engine and in one that is in the other mode."""

    def run() -> list[float]:
        plain = stack(WIDTH, LAYERS)
        oracle = Oracle(plain, make(groups_of(plain)))
        errors = []

        def engine_of() -> Any:
            net = stack(WIDTH, LAYERS)
            engine = make_engine(net, make(groups_of(net)), stage, SMALL)
            attach(engine, **({"param_memory_budget": "all"} if stage == 3 else {}))
            return engine

        def train(engine: Any, ks: range, with_oracle: bool) -> None:
            for k in ks:
                engine.backward(loss_of(engine, k, rank()))
                engine.step()
                if with_oracle:
                    oracle.backward(lambda r, k=k: loss_of(plain, k, r))
                    oracle.step()

        def check(engine: Any) -> None:
            errors.append(distance(full_parameters(engine.module), full_parameters(plain)))

        first = engine_of()
        first.optimizer.train()
        oracle.switch("train")
        train(first, range(3), True)
        first.optimizer.eval()
        oracle.switch("eval")
        if saved == "train":
            first.optimizer.train()
            oracle.switch("train")
        first.save_checkpoint(str(tmp_path))
        first.optimizer.train()
        train(first, range(7, 9), False)
        first.optimizer.eval()
        for number, engine in enumerate((first, engine_of())):
            engine.load_checkpoint(str(tmp_path))
            check(engine)
            if number:  # once for both
                oracle.switch("train")
            engine.optimizer.train()
            if number:
                check(engine)
                train(engine, range(3, 6), True)
                engine.optimizer.eval()
                oracle.switch("eval")
                check(engine)
        return errors

    for errors in run_ranks(run):
        assert errors == [0.0] * 4, errors


def test_where_it_is_refused() -> None:
    def run() -> None:
        net = stack(WIDTH, LAYERS)
        engine = make_engine(net, optimizer := ScheduleFree(groups_of(net)), 3, SMALL)
        engine.optimizer.swap_optimizer = True
        with pytest.raises(ValueError, match=r"ScheduleFree, .* NVMe, .* one at a time.*\"device\": \"cpu\""):
            attach(engine)
        engine.optimizer.swap_optimizer = False
        zerosync = attach(engine)
        with zerosync.full_parameters(), pytest.raises(RuntimeError, match=r"eval\(\) was called inside of full_par"):
            optimizer.eval()
        with zerosync.gathered_for_inference(), pytest.raises(RuntimeError, match=r"\.train\(\) .* inside of gathered"):
            engine.optimizer.train()
        zerosync.detach()
        assert type(optimizer) is ScheduleFree and not hasattr(engine.optimizer, "eval")

    run_ranks(run)
