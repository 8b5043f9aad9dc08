"""Muon for the matrices and AdamW for the rest, in one optimizer, beside AdamW alone, on the same text.

    torchrun --nproc_per_node 2 examples/muon.py --stage 3

What to look at: `MuonWithAdamW`, an optimizer of groups that `torch.optim.Muon` and `torch.optim.AdamW` step, with
which ZeroSync does all by itself: each parameter has an owner, the rank that steps it whole. The table has the loss of
each optimizer and the seconds that it has taken.
"""

import argparse
import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import torch
from gpt import GPT, next_byte_loss
from text import Windows, read_standard_library

from zerosync_strategy import attach, prepare_cpu

BATCH, CONTEXT = 8, 64  # pieces of text per rank and step; bytes of each
PRINTED = 20  # steps of a line of the table


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon steps ``matrices``, AdamW ``others``; groups, states and schedulers are as in any optimizer."""

    def __init__(self, matrices: Sequence[Any], others: Sequence[Any]) -> None:
        self._muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01)
        self._adamw = torch.optim.AdamW(others, lr=3e-3)
        muon, adamw = self._muon.param_groups[0], self._adamw.param_groups[0]
        super().__init__([muon | {"is_muon": True}, adamw | {"is_muon": False}], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for inner, is_muon in ((self._muon, True), (self._adamw, False)):
            inner.param_groups = [group for group in self.param_groups if group["is_muon"] == is_muon]
            inner.state = self.state
            inner.step()
        return loss


def with_muon(model: GPT) -> MuonWithAdamW:
    """Muon for the matrices between embeddings and head."""
    matrices = [param for param in model.blocks.parameters() if param.dim() == 2]
    known = set(matrices)
    return MuonWithAdamW(matrices, [param for param in model.parameters() if param not in known])


def with_adamw(model: GPT) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2, help="ZeRO stage (default: 2)")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each (default: 200)")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        raise SystemExit("Start it with: torchrun --nproc_per_node 2 examples/muon.py")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not torch.cuda.is_available():
        prepare_cpu()
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))

    engines = []
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,  # DeepSpeed's word for a class that it does not know
        "zero_optimization": {"stage": options.stage},
    }
    for make in (with_adamw, with_muon):
        torch.manual_seed(0)
        model = GPT(layers=2, width=128, context=CONTEXT)
        engine, *_ = deepspeed.initialize(model=model, optimizer=make(model), config=config)
        attach(engine)
        engines.append(engine)

    text, _ = read_standard_library()
    pieces = Windows(text, options.steps * world * BATCH, CONTEXT)
    batches = torch.utils.data.DataLoader(pieces, BATCH, sampler=range(rank, len(pieces), world))
    losses, seconds = torch.zeros(2), [0.0, 0.0]
    if rank == 0:
        print(" step |  AdamW: loss       s |   Muon: loss       s")
    for step, batch in enumerate(batches, 1):
        for place, engine in enumerate(engines):  # in turns, so that a busy machine is busy for both
            tokens, began = batch.to(engine.device), time.perf_counter()
            loss = next_byte_loss(engine(tokens), tokens)
            engine.backward(loss)
            engine.step()
            losses[place] += loss.item()
            seconds[place] += time.perf_counter() - began
        if step % min(PRINTED, options.steps) == 0:
            losses /= min(PRINTED, options.steps)
            torch.distributed.all_reduce(losses, torch.distributed.ReduceOp.AVG)
            if rank == 0:
                columns = (f"{loss:12.3f} {taken:7.1f}" for loss, taken in zip(losses.tolist(), seconds, strict=True))
                print(f"{step:5d} | " + " | ".join(columns))
            losses.zero_()

    for engine in engines:
        engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
