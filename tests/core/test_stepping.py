"""The step, piece by piece (H3): right, unnoticed, and on stages 1 and 2 with gathers that begin before it ends."""

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.harness.data import noise
from tests.harness.engines import attached_of, make_engine, rank
from tests.harness.oracle import NORM, Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.comm import nodes
from zerosync_strategy.core.engine import zero3_optimizer
from zerosync_strategy.core.gradients import layout, reducer
from zerosync_strategy.core.optimizer import masters

WIDTHS = (7, 9, 11, 5, 6)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=0.5),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.05),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05, amsgrad=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.05, fused=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.05),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.05),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS)])


data = noise(4, WIDTHS[0])


def groups_of(net: Any) -> list[dict[str, Any]]:
    return [{"params": net[:2].parameters()}, {"params": net[2:].parameters(), "lr": 0.02}]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "WITHIN_HOST", nodes.MessageSizes(200, 2))
    monkeypatch.setattr(reducer, "SMALL_BYTES", 200)  # as many by NCCL
    monkeypatch.setattr(masters, "STEP_NUMEL", 16)


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which gathers and steps of pieces were made, in their order."""
    made: list[str] = []
    gather, step = layout.all_gather, torch.optim.AdamW.step

    def stepping(self: Any, *args: Any) -> Any:
        made.append(f"step {sum(param.numel() for group in self.param_groups for param in group['params'])}")
        return step(self, *args)

    def gathering(rows: torch.Tensor, *args: Any) -> Any:
        made.append(f"gather {rows.shape[1]}")
        return gather(rows, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", stepping)
    monkeypatch.setattr(layout, "all_gather", gathering)
    return made


@pytest.mark.extended(but=("adamw-3",))
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(optimizer: str, stage: int) -> None:
    """With groups of other learning rates and a scheduler; also where a checkpoint's states come in between."""

    def run() -> float:
        net, plain = network(), network()
        engine = make_engine(net, OPTIMIZERS[optimizer](groups_of(net)), stage)
        attach(engine)
        oracle = Oracle(plain, OPTIMIZERS[optimizer](groups_of(plain)))
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(engine.optimizer.optimizer, 0.9)]
        schedulers += [torch.optim.lr_scheduler.ExponentialLR(oracle.optimizer, 0.9)]
        for k in range(5):
            engine.backward(engine(data(k, rank())).square().mean())
            oracle.backward(lambda r, k=k: plain(data(k, r)).square().mean())
            engine.step()
            oracle.step()
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
                for scheduler in schedulers:
                    scheduler.step()
            assert len(engine.optimizer.optimizer.state) <= 2  # one of each group
            if k == 2 and stage == 2:
                engine.optimizer.load_state_dict([engine.optimizer.state_dict()] * 2)
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]


def test_stage_3_steps_gradients_where_they_are() -> None:
    """No copy of them is made; and their norm is that of plain torch."""

    def run() -> float:
        net, plain = network(), network()
        optimizer = torch.optim.SGD(groups_of(net), lr=0.1)
        engine = make_engine(net, optimizer, 3)
        zerosync = attach(engine)
        gradients = zero3_optimizer.gradient_shards(engine.optimizer).values()
        shards = {shard.untyped_storage().data_ptr() for shard in gradients}
        stepped = []

        def see(of: Any, *_: Any) -> None:
            stepped.extend(param.grad for group in of.param_groups for param in group["params"])

        optimizer.register_step_pre_hook(see)
        oracle = Oracle(plain, torch.optim.SGD(groups_of(plain), lr=0.1))
        engine.backward(engine(data(0, rank())).square().mean())
        oracle.backward(lambda r: plain(data(0, r)).square().mean())
        engine.step()
        assert {grad.untyped_storage().data_ptr() for grad in stepped} == shards
        assert float(engine.get_global_grad_norm()) == pytest.approx(oracle.step(clip=1e9), rel=NORM)
        assert zerosync.report.reductions == 1
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]


def test_a_gather_begins_before_the_step_ends(gathers: list[str]) -> None:
    def run() -> list[str]:
        net = network()
        engine = make_engine(net, torch.optim.AdamW(net.parameters()), 1)
        attach(engine)
        engine.backward(engine(data(0, rank())).square().mean())
        engine.step()
        return gathers

    for made in run_ranks(run):
        numels = [[int(each.split()[1]) for each in run] for _, run in itertools.groupby(made, lambda each: each[:4])]
        steps, gathered = numels[::2], numels[1::2]
        assert len(steps) > 3 and max(map(len, steps)) > 1
        assert list(map(sum, steps)) == list(map(sum, gathered))


def test_only_the_host_steps_by_what_fits_its_caches() -> None:
    assert len(list(masters.step_slices(torch.empty(500), 0, 500))) > 1
    assert list(masters.step_slices(torch.empty(500, device="meta"), 100, 500)) == [(100, 500, None)]


@pytest.mark.parametrize("numel", [64, 10**6])
def test_small_pieces_are_stepped_together(
    numel: int, gathers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(masters, "STEP_NUMEL", numel)

    def run() -> list[int]:
        net = network()
        engine = make_engine(net, torch.optim.AdamW(net.parameters()), 1)
        attach(engine)
        engine.backward(engine(data(0, rank())).square().mean())
        engine.step()
        return [int(name.split()[1]) for name in gathers if name.startswith("step")]

    for steps in run_ranks(run):
        *others, _ = steps
        assert all(of_piece >= numel for of_piece in others)
        assert (len(steps) > 1) == (numel == 64)


def test_hooks_see_one_step_of_everything() -> None:
    """Those of an optimizer and those of all optimizers, before a step and after it."""

    def run() -> None:
        seen: list[str] = []
        net = network()
        optimizer = torch.optim.AdamW(net.parameters())
        engine = make_engine(net, optimizer, 2)
        attach(engine)

        def hook(name: str) -> Callable[..., None]:
            def see(of: Any, args: Any, kwargs: Any) -> None:
                del args, kwargs
                params = [param for group in of.param_groups for param in group["params"]]
                assert [param.numel() for param in params] == [numel]
                seen.append(name)

            return see

        numel = optimizer.param_groups[0]["params"][0].numel()
        register = [
            optimizer.register_step_pre_hook,
            optimizer.register_step_post_hook,
            register_optimizer_step_pre_hook,
            register_optimizer_step_post_hook,
        ]
        for each in register:
            handle = each(hook(each.__name__))
            engine.backward(engine(data(0, rank())).square().mean())
            engine.step()
            assert seen == [each.__name__]
            seen.clear()
            handle.remove()

    run_ranks(run)


def test_a_step_that_raises_half_way(tmp_path: Path) -> None:
    """The error is the optimizer's, and a checkpoint brings training back."""

    def run() -> float:
        net, plain = network(), network()
        optimizer = torch.optim.AdamW(net.parameters())
        engine = make_engine(net, optimizer, 2)
        zerosync = attach(engine)
        oracle = Oracle(plain, torch.optim.AdamW(plain.parameters()))
        stock, calls = torch.optim.AdamW.step.__wrapped__, []  # type: ignore[attr-defined]
        assert len(attached_of(zerosync).stage.masters.slices()[0][1]) > 3

        def failing(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == 3:
                raise ArithmeticError("half way")
            return stock(*args)

        for k in range(4):
            if k == 1:
                engine.save_checkpoint(str(tmp_path))
                torch.optim.AdamW.step.__wrapped__ = failing  # type: ignore[attr-defined]
                engine.backward(engine(data(7, rank())).square().mean())
                with pytest.raises(ArithmeticError, match="half way"):
                    engine.step()
                torch.optim.AdamW.step.__wrapped__ = stock  # type: ignore[attr-defined]
                assert [len(group["params"]) for group in optimizer.param_groups] == [1]
                engine.load_checkpoint(str(tmp_path))
            engine.backward(engine(data(k, rank())).square().mean())
            oracle.backward(lambda r, k=k: plain(data(k, r)).square().mean())
            engine.step()
            oracle.step()
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]
