"""fp16: losses are scaled, norms pass 65,504, and a step whose gradients overflow on one rank is skipped on all."""

import contextlib
from typing import Any

import pytest
import torch

from tests.harness.copying import loss_of, network
from tests.harness.engines import make_engine, rank
from tests.harness.extended import STAGES
from tests.harness.masters import Masters
from tests.harness.native import send_natively
from tests.harness.oracle import NORM, distance, full_parameters
from tests.harness.racecheck import simulate
from tests.harness.ranks import run_ranks
from tests.harness.releases import fp16_supported
from zerosync_strategy import attach

LARGEST = torch.finfo(torch.float16).max
SCALE_POWER = 13
LOSS = 28.0  # times the loss: the norm of its gradient is about 25
BACKWARDS = 2
OVERFLOWS = 2  # the backward in which a gradient of rank 1 alone is no number of fp16
STEPS, RATE = 4, 5e-3


def device() -> Any:
    """One that does fp16: this CPU, or the simulated one."""
    return contextlib.nullcontext() if fp16_supported() else simulate(backend=None)


def scaled_loss(module: Any, k: int, of_rank: int, overflows: bool) -> torch.Tensor:
    loss = LOSS * loss_of(lambda x: module(x.to(next(module.parameters()).dtype)).float(), k, of_rank)
    if overflows and k == OVERFLOWS and of_rank == 1:
        loss = loss + 100 * getattr(module, "module", module)[2].bias[:1].float().sum()  # 819,200 with the scale
    return loss


STATIC, DYNAMIC = {"loss_scale": 2**SCALE_POWER}, {"initial_scale_power": SCALE_POWER, "hysteresis": 1}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
HELD = {"param_memory_budget": "all"}


@pytest.mark.extended(
    but=(
        "1-options0-zero0-scale0-0.0-False",
        "3-options5-zero5-scale5-0.0-True",
    )
)
@pytest.mark.parametrize(
    ("stage", "options", "zero", "scale", "clip", "overflows"),
    [
        (1, {}, {}, STATIC, 0.0, False),
        (1, {"coalesce": False}, {}, DYNAMIC, 1.0, True),
        (2, {}, {}, DYNAMIC, 0.0, True),
        (2, {"grad_memory_budget": 2_000}, OFFLOAD, STATIC, 1.0, True),
        (3, {}, {}, STATIC, 1.0, False),
        (3, {"coalesce": False}, {}, DYNAMIC, 0.0, True),
        (3, HELD, {}, DYNAMIC, 1.0, True),
        (3, {**HELD, "grad_memory_budget": 2_000}, {}, STATIC, 1.0, True),
        (3, HELD, OFFLOAD, DYNAMIC, 1.0, True),
        (3, {}, {**OFFLOAD, "offload_param": {"device": "cpu"}}, STATIC, 0.0, True),
    ],
)  # fmt: skip
def test_training(stage: int, options: Any, zero: Any, scale: Any, clip: float, overflows: bool) -> None:
    """As in plain torch, but for what rounds otherwise; a skipped step would be RATE off."""

    def run() -> Any:
        with device():
            adamw = lambda weights: torch.optim.AdamW(weights, lr=RATE)  # noqa: E731
            oracle = Masters(network(), torch.float16, adamw, scale=2**SCALE_POWER, clip=clip)
            net, oracles = network(), []
            small = {"reduce_bucket_size": 300, "stage3_param_persistence_threshold": 0}
            engine = make_engine(
                net, adamw(net.parameters()), stage, {**small, **zero},
                fp16={"enabled": True, **scale}, gradient_clipping=clip,
            )  # fmt: skip
            zerosync = attach(engine, **options)
            errors, norms = [], []
            for step in range(STEPS):
                ks = range(BACKWARDS * step, BACKWARDS * (step + 1))
                for k in ks:
                    engine.backward(scaled_loss(engine, k, rank(), overflows) / BACKWARDS)
                norms.append(float(zerosync.gradient_norm()))
                engine.step()
                norm = oracle.step(lambda module, k, r: scaled_loss(module, k, r, overflows) / BACKWARDS, ks)
                if norm is not None:
                    assert norm * 2**SCALE_POWER / 2 > LARGEST > oracle.largest_gradient
                    oracles.append(norm)
                errors.append(distance(full_parameters(net), oracle.parameters()))
            finite = [norm for norm in norms if norm < torch.inf]
            assert finite == pytest.approx(oracles, rel=2e-3) and len(norms) - len(finite) == overflows
            assert engine.skipped_steps == overflows
            assert engine.optimizer.loss_scale == 2**SCALE_POWER / (2 if overflows and scale is DYNAMIC else 1)
            return max(errors)

    for error in run_ranks(run):
        assert error < RATE / 10


@pytest.mark.extended(but=("1", "3"))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_whose_sum_is_no_number_of_fp16(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks 40,000 each: NCCL sums in the dtype in which they are sent."""
    send_natively(monkeypatch)

    def run() -> float:
        with device():
            net = network()
            engine = make_engine(
                net, torch.optim.SGD(net.parameters(), lr=2**-20), stage, fp16={"enabled": True, "loss_scale": 1.0}
            )
            attach(engine)
            before = full_parameters(net)
            engine.backward(40_000 * sum(param.float().sum() for param in engine.module.parameters()))
            engine.step()
            return max(float((before[name] - value).abs().min()) for name, value in full_parameters(net).items())

    assert min(run_ranks(run)) > 0.03


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
def test_a_mean_over_a_million_items(stage: int) -> None:
    """Two ranks over a million is 2e-6, which fp16 knows to 1 %."""

    def run() -> list[float]:
        with device():
            net = network()
            engine = make_engine(
                net, torch.optim.AdamW(net.parameters()), stage, fp16={"enabled": True, "loss_scale": 1}
            )
            zerosync = attach(engine, loss_reduction="sum")
            seen = []
            for items in (4, 1_000_000):
                zerosync.mean_over(items / 2)
                engine.backward(items * 1e-2 * loss_of(lambda x: engine(x.half()).float(), 0, rank()))
                with zerosync.full_gradients():
                    seen.append(torch.cat([param.grad.flatten().double() for param in net.parameters()]).norm())
                engine.zero_grad()
            return (seen[1] / seen[0]).item()

    for ratio in run_ranks(run):
        assert ratio == pytest.approx(1, rel=2e-3)


@pytest.mark.parametrize("stage", STAGES)
def test_norms_in_bf16_are_those_of_the_gradients(stage: int) -> None:
    def run() -> Any:
        net = network()
        engine = make_engine(net, torch.optim.AdamW(net.parameters()), stage, bf16={"enabled": True})
        zerosync = attach(engine)
        engine.backward(loss_of(lambda x: engine(x.bfloat16()).float(), 0, rank()))
        with zerosync.full_gradients():
            norm = torch.cat([param.grad.flatten().double() for param in net.parameters()]).norm()
        return float(zerosync.gradient_norm()), float(norm)

    for found, norm in run_ranks(run):
        assert found == pytest.approx(norm, rel=NORM)
