"""One rank of the doctor's tests: ``python -m zerosync_strategy.tools.doctor.on_rank DEVICE PART...``

Its environment is that of a rank of torchrun's. What the first rank has measured are lines of JSON behind ``MEASURED``.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from zerosync_strategy.core.attaching import attach
from zerosync_strategy.core.engine.compat import prepare_cpu
from zerosync_strategy.core.engine.types import DeepSpeedEngine
from zerosync_strategy.core.handle import ZeroSync

MEASURED = "doctor measured "
STUCK, KILLED = "doctor: stuck now", "doctor: killed now"
TIMEOUT = timedelta(seconds=60)
"""Of the process group. Ranks say at half of it why they wait (``failures/rank_status.py``)."""
ROUNDING = 1e-5
"""W2: 84 units in the last place of 1. Another order of a sum changes a few of them; a lost gradient far more."""
STEPS, BACKWARDS, BATCH, WIDTH = 3, 2, 4, 16
_MIB = 1 << 20
LARGE = {"cuda": (16 * _MIB, 256 * _MIB), "cpu": (_MIB, 4 * _MIB)}
"""Bytes of what is gathered, or reduced, by kind of device."""
SMALL_STEP = {"cuda": (8, 2048, 4096), "cpu": (2, 64, 16)}
"""Layers, their width, and rows of a batch, by kind of device."""
_REPEATS = 5


def main(kind: str, parts: Sequence[str]) -> None:
    """Run ``parts`` on this rank, on a device of this kind: ``"cpu"`` or ``"cuda"``."""
    device = begin(kind)
    for part in parts:
        PARTS[part](device)


def begin(kind: str) -> torch.device:
    """Make the process group, over gloo on the CPU and else over NCCL, and return this rank's device."""
    device = torch.device(kind, *([int(os.environ["LOCAL_RANK"])] if kind != "cpu" else []))
    if kind == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        prepare_cpu()
    else:
        torch.cuda.set_device(device)
    backend = "gloo" if kind == "cpu" else "nccl"
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=TIMEOUT)
    return device


@contextmanager
def attached(model: nn.Module, stage: int, **config: object) -> Iterator[tuple[DeepSpeedEngine, ZeroSync]]:
    """An engine that trains ``model`` by SGD, and its handle."""
    given = {
        "train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **config,
    }  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=given, dist_init_required=False)
    zerosync = attach(engine)
    yield engine, zerosync
    zerosync.detach()
    engine.destroy()


def small() -> nn.Module:
    """Return the model of the parts in which times do not matter, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def correct(device: torch.device) -> None:
    """Train on stages 1, 2 and 3.

    Raises:
        ArithmeticError: parameters differ from plain torch's by more than rounding, or a step had not exactly one
            reduction.
    """
    for stage in (1, 2, 3):
        _train(stage, device)


def _train(stage: int, device: torch.device) -> None:
    """Train a small model with ZeroSync on this rank, and the same model with plain torch on the batches of all."""
    model = small().to(device)
    plain = copy.deepcopy(model)
    oracle = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = torch.randn(STEPS, BACKWARDS, world_size, BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    with attached(model, stage) as (engine, zerosync):
        for of_step in batches.to(device):
            oracle.zero_grad()
            for of_backward in of_step:
                engine.backward(engine(of_backward[rank]).square().mean() / BACKWARDS)
                for of_rank in of_backward:
                    (plain(of_rank).square().mean() / (BACKWARDS * world_size)).backward()
            engine.step()
            oracle.step()
        with zerosync.full_parameters(), torch.no_grad():
            pairs = zip(engine.module.parameters(), plain.parameters(), strict=True)
            difference = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
        assert zerosync.report is not None
        reductions = zerosync.report.reductions
        if not difference <= ROUNDING or reductions != 1:
            found = f"parameters differ by {difference:g}, {reductions} reduction(s) per step"
            raise ArithmeticError(f"stage {stage}: {found}")


def bandwidth(device: torch.device) -> None:
    """Measure the bus bandwidth of the two collectives, as nccl-tests counts it: what a rank sends by the seconds."""
    world_size = dist.get_world_size()
    for nbytes in LARGE[device.type]:
        part = torch.ones(nbytes // 4 // world_size, device=device)
        whole = part.repeat(world_size)
        calls: dict[str, Callable[[], Any]] = {
            "all-gather": lambda: dist.all_gather_into_tensor(whole, part),  # noqa: B023
            "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole),  # noqa: B023
        }
        for name, call in calls.items():
            rate = part.nbytes * (world_size - 1) / _seconds(call, device)
            _measured(part="bandwidth", collective=name, nbytes=whole.nbytes, rate=rate)


def step(device: torch.device) -> None:
    """Measure a small step on stages 2 and 3, in bf16, and plain torch's of one rank, which communicates nothing."""
    layers, width, rows = SMALL_STEP[device.type]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))
    model = model.to(device, torch.bfloat16)
    batch = torch.randn(rows, width, device=device).bfloat16()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)

    def alone() -> None:
        plain(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    compute = _seconds(alone, device)
    for stage in (2, 3):
        with attached(copy.deepcopy(model), stage, bf16={"enabled": True}) as (engine, _):

            def all_together() -> None:
                engine.backward(engine(batch).float().square().mean())
                engine.step()

            spent = _seconds(all_together, device)
        parameters = sum(param.numel() for param in plain.parameters())
        _measured(part="step", stage=stage, seconds=spent, compute=compute, parameters=parameters, rows=rows)


def faults(device: torch.device) -> None:
    """Train, while the last rank is stuck until its standard input has a line, and later ends by SIGKILL."""
    chosen = dist.get_rank() == dist.get_world_size() - 1
    with attached(small().to(device), 2) as (engine, _):

        def train() -> None:
            engine.backward(engine(torch.ones(BATCH, WIDTH, device=device)).square().mean())
            engine.step()
            _synchronize()

        train()
        if chosen:
            print(STUCK, flush=True)
            sys.stdin.readline()
        train()
        if chosen:
            print(KILLED, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        train()


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one ``run`` of several in a row, on the slowest rank."""
    spent = torch.zeros((), device=device)
    for _ in ("warm-up", "timed"):
        dist.all_reduce(spent, dist.ReduceOp.MAX)  # so that all begin together
        _synchronize()
        began = time.perf_counter()
        for _ in range(_REPEATS):
            run()
        _synchronize()
        spent = torch.full_like(spent, (time.perf_counter() - began) / _REPEATS)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def _synchronize() -> None:
    deepspeed.get_accelerator().synchronize()


def _measured(**values: object) -> None:
    if dist.get_rank() == 0:
        print(f"{MEASURED}{json.dumps(values)}", flush=True)


PARTS: dict[str, Callable[[torch.device], None]] = {each.__name__: each for each in (correct, bandwidth, step, faults)}

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
