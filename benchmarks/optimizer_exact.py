"""How far optimizers of other packages that need whole parameters are from plain torch in one process.

    torchrun --nproc_per_node 2 benchmarks/optimizer_exact.py --output benchmarks/results/<date>-optimizer-exact.md

Two ranks train a small network in fp32, on ZeRO-2 and ZeRO-3. Beside, each rank trains the same network in plain torch,
with the mean of both ranks' gradients. Each step begins with its own seed. A class that is not installed is left out.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from output import command, processor

from zerosync_strategy import attach, prepare_cpu

STAGES = (2, 3)
NAMED: dict[str, dict[str, Any]] = {
    "pytorch_optimizer:Lamb": {},
    "pytorch_optimizer:LARS": {},
    "pytorch_optimizer:SOAP": {"precondition_frequency": 2},
    "pytorch_optimizer:Shampoo": {"preconditioning_compute_steps": 2},
    "pytorch_optimizer:ScalableShampoo": {"start_preconditioning_step": 2},
    "pytorch_optimizer:Ranger": {},
    "pytorch_optimizer:Kron": {"pre_conditioner_update_probability": 1.0},
    "pytorch_optimizer:Muon": {},
    "pytorch_optimizer:AdaFactor": {},
    "pytorch_optimizer:AdamMini": {},
    "transformers:Adafactor": {"scale_parameter": True, "relative_step": True},
    "timm.optim:Muon": {"lr": 0.02},
    "timm.optim:Lars": {"lr": 0.1},
}


def network() -> torch.nn.Module:
    """Return one with matrices and biases, the same each time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(24, 96), torch.nn.Tanh(), torch.nn.Linear(96, 48, bias=False))


def loss_of(module: Any, step: int, rank: int) -> torch.Tensor:
    """Return the loss of a rank's batch of 256."""
    batch = torch.randn(256, 24, generator=torch.Generator().manual_seed(2 * step + rank))
    return (module(batch) - batch.repeat(1, 2)).square().mean()


def made(name: str, module: torch.nn.Module, options: dict[str, Any]) -> Any:
    """Return an optimizer of the class ``name``, of a package, over the parameters of ``module``."""
    package, _, cls = name.partition(":")
    params = list(module.parameters())
    groups = [
        {"params": [param for param in params if (param.dim() == 2) is use], "use_muon": use} for use in (True, False)
    ]
    given = module if cls == "AdamMini" else groups if name == "pytorch_optimizer:Muon" else params
    return getattr(importlib.import_module(package), cls)(given, **options)


def seeded(step: int, call: Callable[[], Any]) -> None:
    """Step an optimizer that may draw random numbers."""
    torch.manual_seed(step)
    random.seed(step)
    call()


def difference(name: str, stage: int, steps: int, options: dict[str, Any]) -> tuple[float, float]:
    """Return the largest difference of a parameter after so many steps, and the largest that training has made."""
    rank, plain, net = dist.get_rank(), network(), network()
    start = [param.detach().clone() for param in plain.parameters()]
    ours, theirs = made(name, net, options), made(name, plain, options)
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=net, optimizer=ours, config=config, dist_init_required=False)
    attach(engine, elementwise_optimizer="whole")
    for step in range(steps):
        engine.backward(loss_of(engine, step, rank))
        seeded(step, engine.step)
        ranks = [torch.autograd.grad(loss_of(plain, step, each), list(plain.parameters())) for each in (0, 1)]
        for param, *grads in zip(plain.parameters(), *ranks, strict=True):
            param.grad = (grads[0] + grads[1]) / 2
        seeded(step, theirs.step)
    off = moved = 0.0
    for param, right, before in zip(net.parameters(), plain.parameters(), start, strict=True):
        with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
            off = max(off, float((param - right).abs().max()))
        moved = max(moved, float((right - before).abs().max()))
    return off, moved


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--classes", nargs="+", choices=NAMED, default=NAMED)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    prepare_cpu()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    columns = ("class", "options", "stage", "largest difference", "largest change by training", "steps")
    lines, versions = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)], {}
    for name in options.classes:
        package = name.partition(":")[0].partition(".")[0]
        try:
            versions[package] = version(package.replace("_", "-"))
        except ImportError:
            continue
        for stage in STAGES:
            try:
                off, moved = difference(name, stage, options.steps, NAMED[name])
                found = f"{off:.2g} | {moved:.2g}"
            except Exception as error:
                found = f"{type(error).__name__}: {' '.join(str(error).split())[:150]} | "
            lines.append(f"| {name} | {NAMED[name] or ''} | {stage} | {found} | {options.steps} |")
            if dist.get_rank() == 0:
                print(lines[-1], flush=True)
    if options.output is not None and dist.get_rank() == 0:
        of = ", ".join(f"{package} {number}" for package, number in versions.items())
        options.output.write_text("\n".join([f"{processor()}, {of}: `{command()}`", "", *lines]) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    main()
