r"""Train the same small Llama with the Trainer of Hugging Face. Nothing in this script knows of ZeroSync or DeepSpeed.

    accelerate launch --config_file examples/accelerate/zerosync_cpu.yaml \
        -m zerosync_strategy.accelerate.run examples/accelerate/hf_trainer.py

With `--resume checkpoints/hf_trainer/checkpoint-50` behind it, a run goes on as if it had never stopped.

What to look at: the command. `zerosync_strategy.accelerate.run` runs any script that trains with Accelerate underneath,
and the options of ZeroSync are in the launch configuration.
"""

import argparse
import warnings

import torch
from llama import pieces, small_llama
from transformers import Trainer, TrainingArguments, set_seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: 100)")
    parser.add_argument("--accumulate", type=int, default=4, help="backwards per optimizer step (default: 4)")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients (default: 1.0)")
    parser.add_argument("--pieces", type=int, default=3000, help="pieces of text per epoch (default: 3000)")
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations and checkpoints (default: 50)")
    parser.add_argument("--checkpoints", default="checkpoints/hf_trainer", help="folder to make them in")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")

    set_seed(0)
    training, validation = pieces(options.pieces, 128)
    gpu = torch.cuda.is_available()
    arguments = TrainingArguments(
        max_steps=options.steps,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=options.lr,
        lr_scheduler_type="cosine",
        warmup_steps=options.steps // 10,
        max_grad_norm=options.clip,
        logging_steps=10,
        logging_first_step=True,
        eval_strategy="steps",
        eval_steps=options.every,
        save_steps=options.every,
        output_dir=options.checkpoints,
        bf16=gpu,
        dataloader_pin_memory=gpu,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(small_llama(), arguments, train_dataset=training, eval_dataset=validation)
    trainer.train(resume_from_checkpoint=options.resume)
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"validation loss at the end {loss}")


if __name__ == "__main__":
    main()
