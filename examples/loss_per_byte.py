"""Lines of any length: a loss per byte of the whole optimizer step, however its lines are cut into batches.

    torchrun --nproc_per_node 2 examples/loss_per_byte.py --stage 3

What to look at: `zerosync.mean_over(...)` before each backward, and a loss that is a sum. Each step trains on the same
lines, with `--accumulate 2` as with `--accumulate 8` and on any number of ranks, so the curve is the same as well. With
a mean per micro-batch in its place, it would not be.
"""

import argparse
import os
import warnings

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT
from text import read_standard_library

from zerosync_strategy import attach, prepare_cpu

LINES, LONGEST = 64, 128  # per optimizer step over all ranks; bytes of a line
PADDING = -100  # no byte: cross_entropy leaves it out


def read_lines(count: int) -> list[torch.Tensor]:
    """The first lines of the standard library that have something to guess, in a fixed random order."""
    text, _ = read_standard_library()
    lines = bytes(text[: 100 * count].numpy()).split(b"\n")
    lines = [line[:LONGEST] for line in lines if len(line) > 1][:count]
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(0)).tolist()
    return [torch.tensor(list(lines[place])) for place in order]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2, help="ZeRO stage (default: 2)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument("--accumulate", type=int, default=4, help="backwards per optimizer step (default: 4)")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        raise SystemExit("Start it with: torchrun --nproc_per_node 2 examples/loss_per_byte.py")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not torch.cuda.is_available():
        prepare_cpu()
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))

    torch.manual_seed(0)
    model = GPT(layers=2, width=128, context=LONGEST)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": options.stage}}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3), config=config
    )
    zerosync = attach(engine, loss_reduction="sum")

    lines = read_lines(options.steps * LINES)
    for step in range(options.steps):
        of_step = lines[step * LINES : (step + 1) * LINES]
        totals = torch.zeros(2, device=engine.device)  # nats, bytes
        for number in range(options.accumulate):
            own = of_step[rank * options.accumulate + number :: world * options.accumulate]
            batch = torch.nn.utils.rnn.pad_sequence(own, batch_first=True, padding_value=PADDING).to(engine.device)
            targets = batch[:, 1:]
            guessed = (targets != PADDING).sum()
            zerosync.mean_over(guessed)
            logits = engine(batch.clamp(min=0))[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
            engine.backward(loss)
            totals += torch.stack([loss.detach(), guessed])
        engine.step()
        dist.all_reduce(totals)
        if rank == 0 and (step == 0 or (step + 1) % 5 == 0):
            print(f"step {step + 1:3d}: loss {totals[0] / totals[1]:.4f} nats per byte, of {totals[1]:.0f} bytes")

    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
