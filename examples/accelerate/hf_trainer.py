r"""Train the same small Llama with the Trainer of Hugging Face. Nothing in this script knows of ZeroSync or DeepSpeed.

    accelerate launch --config_file examples/accelerate/zerosync_cpu.yaml \
        -m zerosync_strategy.accelerate.run examples/accelerate/hf_trainer.py

With `--resume out/hf_trainer/checkpoint-50` behind it, a run goes on as if it had never stopped.

What to look at: the command. `zerosync_strategy.accelerate.run` runs any script that trains with Accelerate underneath,
and the options of ZeroSync are in the launch configuration.
"""

import torch
from llama import parse_options, pieces, small_llama
from transformers import Trainer, TrainingArguments, set_seed


def main() -> None:
    options = parse_options(__doc__, "hf_trainer")

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
