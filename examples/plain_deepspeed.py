"""Plain DeepSpeed, without a framework: one line, `attach(engine)`, and many backwards are one reduction.

    torchrun --nproc_per_node 2 examples/plain_deepspeed.py --stage 2

What to look at: the loop in `main`. It calls backward as often as it likes, through the engine or on the loss itself,
and then `engine.step()`; the report tells what that step sent.
"""

import argparse
import os
import warnings

import deepspeed
import torch
from gpt import GPT, next_byte_loss
from text import Windows, read_standard_library

from zerosync_strategy import attach, prepare_cpu

BATCH = 4  # pieces of text per rank and backward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2, help="ZeRO stage (default: 2)")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps (default: 30)")
    parser.add_argument("--accumulate", type=int, default=4, help="backwards per optimizer step (default: 4)")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        raise SystemExit("Start it with: torchrun --nproc_per_node 2 examples/plain_deepspeed.py")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not torch.cuda.is_available():
        prepare_cpu()
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))

    torch.manual_seed(0)
    model = GPT(layers=2, width=128, context=64)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,  # the loop below accumulates, and divides the loss
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": options.stage},
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3), config=config
    )
    zerosync = attach(engine)

    text, _ = read_standard_library()
    pieces = Windows(text, options.steps * options.accumulate * world * BATCH, model.context)
    batches = iter(torch.utils.data.DataLoader(pieces, BATCH, sampler=range(rank, len(pieces), world)))
    for step in range(1, options.steps + 1):
        mean = 0.0
        for number in range(options.accumulate):
            tokens = next(batches).to(engine.device)
            loss = next_byte_loss(engine(tokens), tokens) / options.accumulate
            if number % 2 == 0:
                engine.backward(loss)
            else:
                loss.backward()  # as good: the window sees it
            mean += loss.item()
        engine.step()
        if rank == 0 and (step == 1 or step % 5 == 0):
            print(f"step {step:3d}: loss {mean:.3f} nats per byte")

    if rank == 0:
        report = zerosync.report
        print(f"\nStep {report.step}: {report.backwards} backwards, {report.reductions} reduction of the gradients")
        for kind, traffic in sorted(report.collectives.items()):
            print(f"  {kind}: {traffic.calls} calls, {traffic.bytes / 1e6:.2f} MB sent by this rank")
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
