"""Every stage and precision, with optimizer and parameters on the device, offloaded or on the host, by NCCL's rules."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.gpu.device import COMMUNICATORS, DEVICE, run
from tests.harness.engines import make_engine
from tests.harness.masters import Masters
from tests.harness.optimizers import Noted
from tests.harness.oracle import full_parameters
from zerosync_strategy import attach

WIDTH, STEPS, BACKWARDS = 64, 4, 3
OPTIMIZER = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
PLACES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "device": ({}, {}),
    "streamed": ({"coalesce": False}, {}),
    "held": ({"param_memory_budget": "all"}, {}),
    "host": ({"param_memory_budget": {"device": 0, "host": "all"}}, {}),
    "offloaded": ({}, OPTIMIZER),
    "offloaded with parameters": ({}, {**OPTIMIZER, "offload_param": {"device": "cpu", "pin_memory": True}}),
    "whole parameters": ({}, {}),  # which NCCL sends to their owners, and from them, in groups
}  # fmt: skip
OF_STAGE_3 = ("held", "host", "offloaded with parameters")
OF_STAGES_1_AND_2 = ("gathered after the step",)
SCALE = 2**10
CONFIG = {
    torch.float32: {},
    torch.bfloat16: {"bf16": {"enabled": True}},
    torch.float16: {"fp16": {"enabled": True, "loss_scale": SCALE}},
}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, 2 * WIDTH), nn.GELU())
    return nn.Sequential(*layers, nn.Linear(2 * WIDTH, WIDTH))


def sgd(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.2, momentum=0.9)


def loss_of(module: Any, k: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * k + rank)).to(DEVICE)
    return (module(x.to(dtype)).float() - x).square().mean() / BACKWARDS


def errors(
    stage: int, dtype: torch.dtype, ours: dict[str, Any], zero: dict[str, Any],
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd, attachments: int = 1,
) -> tuple[float, float]:  # fmt: skip
    """The largest difference from plain torch of any parameter, and how much rounding explains.

    `attachments`: how often ZeroSync is attached, and detached again in between.
    """
    net, plain = network().to(DEVICE), network().to(DEVICE)
    world = torch.distributed.get_world_size()
    oracle = Masters(plain, dtype, optimizer, world, SCALE if dtype is torch.float16 else 1.0)
    start = {name: param.clone() for name, param in oracle.parameters().items()}
    small = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": WIDTH * WIDTH, "overlap_comm": True}
    engine = make_engine(net, optimizer(net.parameters()), stage, {**small, **zero}, **CONFIG[dtype])
    zerosync = attach(engine, **ours)
    for step in range(STEPS):
        if 0 < step < attachments:
            zerosync.detach()
            zerosync = attach(engine, **ours)
        ks = range(BACKWARDS * step, BACKWARDS * (step + 1))
        for k in ks:
            if k == ks[-1]:
                zerosync.window.expect_last()
            engine.backward(loss_of(engine, k, int(os.environ["RANK"]), dtype))
        engine.step()
        assert oracle.step(lambda module, k, rank: loss_of(module, k, rank, dtype), ks) is not None
    ours_full, right = full_parameters(net), oracle.parameters()
    moved = max((right[name] - start[name]).abs().max().item() for name in right)
    error = max((ours_full[name].to(right[name]) - right[name]).abs().max().item() for name in right)
    # Gradients are rounded to the parameters' precision, for each rank and in another order; weights to fp32's.
    eps, least = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    bound = 8 * eps * moved + 32 * least * max(each.abs().max().item() for each in right.values())
    return error, bound * max(1, world / 2)  # each rank's gradient is added, and rounded, once more


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", CONFIG, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_is_that_of_plain_torch(stage: int, dtype: torch.dtype, place: str, record_property: Any) -> None:
    """With NCCL, one rank for each GPU; and two ranks on one GPU, whose calls must match as NCCL's must."""
    if place in (OF_STAGES_1_AND_2 if stage == 3 else OF_STAGE_3):
        pytest.skip(f"stage {stage} has no such option")
    for communicator in COMMUNICATORS:
        optimizer = Noted if place == "whole parameters" else sgd
        for error, bound in run(errors, stage, dtype, *PLACES[place], optimizer, shared=communicator != "NCCL"):
            record_property(communicator, f"{error:.1e} of {bound:.1e}")
            assert error <= bound
