"""Thousands of steps of a run that is disturbed again and again, against the oracle."""

import functools
import gc
import os
import random
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.engines import make_engine, rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.problem import adamw, loss_of, network
from zerosync_strategy import attach

WORLD = 2


def batch(step: int, k: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed((step * 16 + k) * WORLD + rank)
    return torch.randn(2, 16, generator=generator), torch.randn(2, 4, generator=generator)


def backwards_of(step: int) -> int:
    return random.Random(step).randint(1, 6)


def soak(stage: int, steps: int, directory: Path) -> dict[str, Any]:
    """Windows of random length; every 50 steps validation, every 250 a checkpoint, every 100 an exception.

    What it used half-way and at the end, and the parameters.
    """
    net = network()
    engine = make_engine(net, adamw(net.parameters()), stage, {"stage3_param_persistence_threshold": 0})
    zerosync = attach(engine, param_memory_budget="all" if stage == 3 else 0)
    usage = []
    for step in range(steps):
        if step % 100 == 50:
            fail(engine, step, rank())
        for k in range(backwards_of(step)):
            if k + 1 == backwards_of(step):
                zerosync.window.expect_last()
            engine.backward(loss_of(engine, batch(step, k, rank())) / backwards_of(step))
        engine.step()
        if step % 50 == 0:
            engine.eval()
            with torch.no_grad():
                loss_of(engine, batch(0, 0, rank()))
            engine.train()
        if step % 250 == 100:
            engine.save_checkpoint(str(directory), tag="last")
        if step % 100 == 99:
            usage.append(used())
    return {"usage": usage, "parameters": full_parameters(engine.module), "report": zerosync.report}


def fail(engine: Any, step: int, rank: int) -> None:
    """On all ranks, in the backward of a window's second micro-batch. Then train on."""

    def boom(_: torch.Tensor) -> None:
        raise ValueError("boom")

    engine.backward(loss_of(engine, batch(step, 8, rank)))
    loss = loss_of(engine, batch(step, 9, rank))
    loss.register_hook(boom)
    with pytest.warns(UserWarning, match="dropped the gradients of 2 backward"), pytest.raises(ValueError):
        engine.backward(loss)


def used() -> dict[str, int]:
    gc.collect()
    return {
        "objects": len(gc.get_objects()),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "resident pages": int(Path("/proc/self/statm").read_text().split()[1]),
        "peak KiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


@functools.cache
def oracle(steps: int) -> nn.Module:
    net = network()
    plain = Oracle(net, adamw(net.parameters()), WORLD)
    for step in range(steps):
        n = backwards_of(step)
        for k in range(n):
            plain.backward(lambda rank, step=step, k=k, n=n: loss_of(net, batch(step, k, rank)) / n)
        plain.step()
    return net


def error_of(result: dict[str, Any], steps: int) -> float:
    return distance(result["parameters"], full_parameters(oracle(steps)))
