"""Train a small GPT on the source code of Python's own standard library, with ZeRO in a Fabric loop of one's own.

    python examples/fabric_gpt.py               # two ranks on CPU, or every GPU there is
    python examples/fabric_gpt.py --stage 2 --resume

What to look at: the loop in `train`. It is any Fabric program's; only the strategy in `main` is ZeroSync's.
"""

import argparse
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, next_byte_loss
from lightning.fabric import Fabric
from text import Windows, read_standard_library
from torch.utils.data import DataLoader

from zerosync_strategy.fabric import ZeroSyncFabricStrategy

BATCH = 4  # pieces of text per rank and backward
VALIDATION = 128  # pieces of text
CLIP = 1.0
CHECKPOINT = Path("out/fabric_gpt")


def train(fabric: Fabric, options: argparse.Namespace) -> None:
    fabric.seed_everything(0, verbose=False)
    model = GPT(options.layers, options.width, options.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    warm_up = max(1, min(10, options.steps // 4))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up))
    model, optimizer = fabric.setup(model, optimizer)

    text, held_out = read_standard_library()
    pieces = options.steps * options.accumulate * BATCH * fabric.world_size
    training = DataLoader(Windows(text, pieces, options.context), BATCH)
    validation = DataLoader(Windows(held_out, VALIDATION, options.context), BATCH)
    training, validation = fabric.setup_dataloaders(training, validation)

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    if options.resume:
        fabric.load(CHECKPOINT, state)
    fabric.print(f"validation loss before: {evaluate(fabric, model, validation):.3f} nats per byte")
    for number, tokens in enumerate(training, 1):
        if number <= state["step"] * options.accumulate:
            continue  # trained on before
        is_last = number % options.accumulate == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = next_byte_loss(model(tokens), tokens)
            fabric.backward(loss / options.accumulate)
        if not is_last:
            continue
        norm = fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        state["step"] += 1
        if state["step"] % 10 == 0:
            fabric.print(f"step {state['step']:3d}: loss {loss.item():.3f}, norm of the gradients {norm.item():.3f}")
            fabric.save(CHECKPOINT, state)
    fabric.print(f"validation loss after: {evaluate(fabric, model, validation):.3f} nats per byte")


@torch.no_grad()
def evaluate(fabric: Fabric, model: torch.nn.Module, validation: DataLoader) -> float:
    model.eval()
    losses = torch.stack([next_byte_loss(model(tokens), tokens) for tokens in validation])
    model.train()
    return float(fabric.all_reduce(losses.mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3, help="ZeRO stage (default: 3)")
    parser.add_argument("--devices", type=int, help="ranks (default: every GPU, or 2 on CPU)")
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed", "bf16-true"), default="32-true")
    parser.add_argument("--hold", default="0", help="stage 3: param_memory_budget, as '4MB' or 'all' (default: 0)")
    parser.add_argument("--resume", action="store_true", help=f"go on from {CHECKPOINT}")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: 60)")
    parser.add_argument("--accumulate", type=int, default=8, help="backwards per optimizer step (default: 8)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=64, help="bytes that the model sees")
    parser.add_argument("--lr", type=float, default=2e-3)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="(lightning|torch|deepspeed)")
    for name in ("lightning.fabric", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    devices = options.devices or (torch.cuda.device_count() if accelerator == "cuda" else 2)
    if accelerator == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // devices))

    held = {"param_memory_budget": options.hold} if options.stage == 3 else {}
    strategy = ZeroSyncFabricStrategy(stage=options.stage, **held)
    fabric = Fabric(strategy=strategy, accelerator=accelerator, devices=devices, precision=options.precision)
    fabric.launch()
    train(fabric, options)
    report = strategy.zerosync.report
    if report is not None:  # none where the run that is resumed had ended
        fabric.print(
            f"the last step: {report.backwards} backwards, {report.reductions} reduction of the gradients,"
            f" {report.bytes_sent / 1e6:.2f} MB sent by this rank, {report.ratio:.2f} of what it needs to send"
        )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
