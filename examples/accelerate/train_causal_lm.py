"""Train a small Llama on the source code of Python's standard library, with Accelerate and ZeRO-3.

    accelerate launch --config_file examples/accelerate/zerosync_cpu.yaml examples/accelerate/train_causal_lm.py

With `--resume out/causal_lm/step_50` behind it, a run goes on as if it had never stopped.

What to look at: the loop in `main` is an ordinary Accelerate loop. The import of `zerosync_strategy.accelerate` and the
"zerosync" block in the launch configuration make the backwards of an optimizer step one reduction of the gradients.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from llama import CONTEXT, parse_options, pieces, small_llama
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

import zerosync_strategy.accelerate  # noqa: F401

BATCH = 4  # pieces of text per rank and backward
PROMPT = b"def "


@dataclass
class Progress:
    """Where the training is; part of every checkpoint."""

    step: int = 0  # optimizer steps
    batch: int = 0  # batches on each rank

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.batch = state["step"], state["batch"]


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: Any, loader: DataLoader) -> float:
    """The mean loss over all pieces of text, in nats per byte."""
    model.eval()
    losses = []
    for batch in loader:
        logits = model(input_ids=batch["input_ids"]).logits.float()
        loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none").mean(1)
        losses.append(accelerator.gather_for_metrics(loss))  # one per piece; those that only fill a batch are left out
    model.train()
    return torch.cat(losses).mean().item()


def sample(accelerator: Accelerator, model: Any) -> str:
    """Text by the model. Every rank writes the same: under ZeRO-3 each forward gathers the parameters from all."""
    set_seed(0)
    model.eval()
    prompt = torch.tensor([list(PROMPT)], device=accelerator.device)
    text = accelerator.unwrap_model(model).generate(prompt, max_length=CONTEXT, do_sample=True, temperature=0.8)
    return bytes(text[0].tolist()).decode(errors="replace")


def main() -> None:
    options = parse_options(__doc__, "causal_lm")

    # With the seedable sampler, the order of the text depends on the epoch alone: a resumed run finds its place in it.
    in_order = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate, dataloader_config=in_order)
    set_seed(0)
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    ranks = accelerator.num_processes  # a prepared schedule takes a step for each of them
    schedule = get_cosine_schedule_with_warmup(optimizer, options.steps // 10 * ranks, options.steps * ranks)
    training, validation = pieces(options.pieces, 128)
    model, optimizer, schedule, loader, validation_loader = accelerator.prepare(
        model, optimizer, schedule, DataLoader(training, BATCH, shuffle=True), DataLoader(validation, BATCH)
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if options.resume:
        accelerator.load_state(options.resume)
        accelerator.print(f"resumed from {options.resume}")

    losses = []
    while progress.step < options.steps:
        epoch, done = divmod(progress.batch, len(loader))
        loader.set_epoch(epoch)
        for batch in accelerator.skip_first_batches(loader, done):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), options.clip)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            progress.batch += 1
            if not accelerator.sync_gradients:
                continue

            progress.step += 1
            if progress.step == 1 or progress.step % 10 == 0:
                mean = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
                accelerator.print(f"step {progress.step:4d}: loss {mean:.3f} nats per byte, gradient norm {norm:.3f}")
            losses.clear()
            if progress.step == options.steps:
                break
            if progress.step % options.every == 0:
                accelerator.print(f"validation loss {evaluate(accelerator, model, validation_loader):.4f}")
                accelerator.save_state(Path(options.checkpoints, f"step_{progress.step}"))

    report = accelerator.deepspeed_engine_wrapped.zerosync.report
    accelerator.print(f"validation loss at the end {evaluate(accelerator, model, validation_loader)}")
    accelerator.print(f"\nA sample:\n{'-' * 60}\n{sample(accelerator, model)}\n{'-' * 60}")
    accelerator.print(
        f"\nThe last step: {report.backwards} backwards, {report.reductions} reduction of the gradients. Each rank sent"
        f" {report.bytes_sent / 1e6:.2f} MB; the floor is {report.floor_bytes / 1e6:.2f} MB."
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
