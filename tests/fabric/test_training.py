"""A loop under Fabric equals plain torch, with one reduction per optimizer step."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.fabric.runs import backward, losses, make_fabric, set_up, trained
from tests.harness.extended import STAGES
from tests.harness.optimizers import ScheduleFree
from tests.harness.oracle import NORM, distance, full_parameters, of_trained
from tests.harness.problem import adafactor, adamw, oracle
from tests.harness.ranks import run_ranks
from tests.harness.rounding import excess


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_accumulation(stage: int) -> None:
    """With `no_backward_sync` on and off, and without it."""

    def run() -> Any:
        fabric = make_fabric(stage)
        model, optimizer = trained(fabric, adamw)
        reports = []
        for step, controlled in enumerate((True, False, True)):
            batches = range(4 * step, 4 * step + 4)
            for batch, loss in zip(batches, losses(fabric, model, batches, 4), strict=True):
                if controlled:
                    with fabric.no_backward_sync(model, enabled=batch % 4 != 3):
                        fabric.backward(loss)
                else:
                    fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            reports.append(fabric.strategy.zerosync.report)
        plain = oracle(adamw)
        for step in range(3):
            backward(plain, range(4 * step, 4 * step + 4), 4)
            plain.step()
        counts = [(report.backwards, report.reductions, report.early_reductions) for report in reports]
        return distance(full_parameters(model.module), full_parameters(plain.module)), counts

    assert run_ranks(run, timeout=60) == [(0.0, [(4, 1, 1), (4, 1, 1), (4, 1, 1)])] * 2


@pytest.mark.extended
@pytest.mark.parametrize("stage", [2, 3])
def test_a_schedule_free_optimizer(stage: int) -> None:
    def run() -> Any:
        fabric = make_fabric(stage)
        model, optimizer = trained(fabric, ScheduleFree)
        plain, errors = oracle(ScheduleFree), []
        for step in range(4):
            optimizer.train()
            plain.switch("train")
            for loss in losses(fabric, model, range(step, step + 1)):
                fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            backward(plain, range(step, step + 1))
            plain.step()
            optimizer.eval()
            plain.switch("eval")
            errors.append(distance(full_parameters(model.module), full_parameters(plain.module)))
        return errors

    assert run_ranks(run, timeout=60) == [[0.0] * 4] * 2


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
def test_clipping(stage: int) -> None:
    """By norm, by another norm, by value, twice, and to nothing; and of a step that is left out."""

    def clip_plain(plain: Any, clip: Any) -> None:
        stock = plain.optimizer.step
        plain.optimizer.step = lambda: (clip(plain.parameters), stock())
        plain.step()
        plain.optimizer.step = stock

    norm = torch.nn.utils.clip_grad_norm_
    norms: list[Any] = []

    def run() -> Any:
        fabric = make_fabric(stage)
        model, optimizer = trained(fabric)
        plain = oracle()
        clip = lambda **options: norms.append(float(fabric.clip_gradients(model, optimizer, **options)))  # noqa: E731
        cases: list[tuple[Any, Any]] = [
            (lambda: clip(max_norm=0.05), lambda p: norms.append(float(norm(p, 0.05)))),
            (lambda: clip(max_norm=float("inf")), lambda p: norms.append(float(norm(p, float("inf"))))),
            (
                lambda: clip(max_norm=0.01, norm_type=float("inf")),
                lambda p: norms.append(float(norm(p, 0.01, float("inf")))),
            ),
            (
                lambda: fabric.clip_gradients(model, optimizer, clip_val=0.003),
                lambda p: torch.nn.utils.clip_grad_value_(p, 0.003),
            ),
            (
                lambda: (clip(max_norm=0.05), clip(max_norm=0.2)),
                lambda p: (norms.append(float(norm(p, 0.05))), norms.append(float(norm(p, 0.2)))),
            ),
            (lambda: clip(max_norm=0), lambda p: norms.append(float(norm(p, 0)))),
        ]
        largest = 0.0
        for case, (ours, torchs) in enumerate(cases):
            norms.clear()
            for loss in losses(fabric, model, range(case, case + 2), 2):
                fabric.backward(loss)
            ours()
            got = norms.copy()
            optimizer.step()
            optimizer.zero_grad()
            norms.clear()
            backward(plain, range(case, case + 2), 2)
            clip_plain(plain, torchs)
            of_oracle = norms[len(got) :]  # the first are those of the training that is rounded otherwise
            assert got == pytest.approx(of_oracle, rel=NORM)
            largest = max(largest, distance(full_parameters(model.module), full_parameters(plain.module)))
        # A step that is left out for its norm leaves nothing behind.
        for loss in losses(fabric, model, range(2)):
            fabric.backward(loss)
        clip(max_norm=1e-6)
        optimizer.zero_grad()
        for loss in losses(fabric, model, range(2, 4)):
            fabric.backward(loss)
        optimizer.step()
        backward(plain, range(2, 4))
        plain.step()
        return max(largest, distance(full_parameters(model.module), full_parameters(plain.module)))

    assert run_ranks(run, timeout=60) == [0.0, 0.0]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_norm_that_is_not_finite(stage: int) -> None:
    def run() -> None:
        fabric = make_fabric(stage)
        model, optimizer = trained(fabric)
        fabric.backward(next(losses(fabric, model, range(1))) * (float("inf") if fabric.global_rank else 1.0))
        with pytest.raises(RuntimeError, match="cannot clip to max_norm"):
            fabric.clip_gradients(model, optimizer, max_norm=1.0)

    run_ranks(run, timeout=60)


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_schedulers_and_closures(stage: int) -> None:
    """The program steps the scheduler, given to `setup()` or not, before it or after."""

    def run() -> Any:
        fabric = make_fabric(stage)
        net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        torch.manual_seed(7)
        for param in net.parameters():
            nn.init.normal_(param, std=0.1)
        start = {name: param.detach().clone() for name, param in net.named_parameters()}
        make = lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9)  # noqa: E731
        optimizer = make(net.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer, scheduler = set_up(fabric, net, optimizer, scheduler)
        after = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))

        def closure() -> Any:
            optimizer.zero_grad()
            loss = next(losses(fabric, model, range(1)))
            fabric.backward(loss)
            return loss

        returned, rates = [], []
        for _ in range(3):
            returned.append(float(optimizer.step(closure)))
            scheduler.step()
            after.step()
            rates.append(optimizer.param_groups[0]["lr"])

        def make_plain() -> nn.Module:
            plain = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
            plain.load_state_dict(start)
            return plain

        plain = oracle(make, make_plain)
        schedulers = [
            torch.optim.lr_scheduler.StepLR(plain.optimizer, 1, 0.5),
            torch.optim.lr_scheduler.LambdaLR(plain.optimizer, lambda step: 1.0 / (step + 1)),
        ]
        expected = []
        for _ in range(3):
            expected.append(of_trained(plain.module, lambda: next(losses(fabric, plain.module, range(1))).detach()))
            backward(plain, range(1))
            plain.step()
            for each in schedulers:
                each.step()
        assert [excess(torch.tensor(a), b) for a, b in zip(returned, expected, strict=True)] == [0.0] * 3
        same_rate = rates[-1] == plain.optimizer.param_groups[0]["lr"]
        return distance(full_parameters(model.module), full_parameters(plain.module)), same_rate

    assert run_ranks(run, timeout=60) == [(0.0, True)] * 2


@pytest.mark.extended
@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_that_needs_whole_parameters(stage: int) -> None:
    def run() -> float:
        fabric = make_fabric(stage)
        model, optimizer = trained(fabric, adafactor)
        plain = oracle(adafactor)
        for step in range(3):
            batches = range(2 * step, 2 * step + 2)
            for loss in losses(fabric, model, batches, 2):
                fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            backward(plain, batches, 2)
            plain.step(0.5)
        return distance(full_parameters(model.module), full_parameters(plain.module))

    assert run_ranks(run, timeout=100) == [0.0, 0.0]
