"""A run that goes on with the ranks that are left: torchrun starts fewer, and they load the last complete checkpoint.

On each of three machines, of which one is HOST (or three times on one machine, with ``--local-addr=localhost``):

    torchrun --nnodes=1:3 --nproc-per-node=1 --max-restarts=5 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 \
        examples/elastic.py out/elastic

The global batch stays the same: a step has ``PIECES`` pieces, whichever rank computes each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import deepspeed
import torch
from torch import nn

from zerosync_strategy import attach, prepare_cpu

STEPS, PIECES, ROWS, WIDTH = 30, 6, 4, 32
"""Optimizer steps; pieces of a step's batch, and rows of a piece; features."""


def network() -> nn.Module:
    """Return the model, the same on all ranks."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH))


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that plain torch would have, too."""
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def loss_of(module: Callable[[torch.Tensor], torch.Tensor], step: int, piece: int) -> torch.Tensor:
    """Return the mean loss of one piece of the data: to learn to shift its input."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(PIECES * step + piece))
    return (module(x) - x.roll(1, 1)).square().mean()


def train(folder: Path, steps: int = STEPS, begun: Callable[[int], None] = lambda step: None) -> nn.Module:
    """Train to the end, from the last complete checkpoint in ``folder``; ``begun`` is called in each step."""
    prepare_cpu()
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo", auto_mpi_discovery=False)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if PIECES % ranks:
        raise SystemExit(f"{PIECES} pieces cannot be divided among {ranks} ranks. Start another number.")
    module = network()
    config = {
        "train_micro_batch_size_per_gpu": ROWS, "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "zerosync": {"checkpoint_format": "distributed", "checkpoint_background": True},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer_of(module), config=config)
    attach(engine)
    if (folder / "latest").exists():
        engine.load_checkpoint(folder)
    for step in range(engine.global_steps, steps):
        begun(step)
        for piece in range(rank, PIECES, ranks):  # each rank as many: the mean over ranks is that over pieces
            loss = loss_of(engine, step, piece)
            engine.backward(loss * ranks / PIECES)
        engine.step()
        if rank == 0:
            print(f"step {step}, {ranks} ranks, loss {loss.item():.4f}", flush=True)
        if step % 5 == 4:
            engine.save_checkpoint(folder)
    engine.zerosync.wait_for_save()
    return module


if __name__ == "__main__":
    train(Path(sys.argv[1] if len(sys.argv) > 1 else "out/elastic"))
