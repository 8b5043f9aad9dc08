r"""Adapters by PEFT on a frozen Llama, with the Trainer of Hugging Face under ZeRO-3. Takes `pip install peft`.

    accelerate launch --config_file examples/accelerate/zerosync_cpu.yaml \
        -m zerosync_strategy.accelerate.run examples/accelerate/lora.py

What to look at: what is sent. The configuration holds gathered parameters, so the frozen weights are gathered for the
first step and stay; from the second on, a step sends the adapters' gradients and parameters and nothing else.
"""

import warnings
from typing import Any

from llama import parse_options, pieces, small_llama
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class Sent(TrainerCallback):
    """Prints what the first rank sends in a step."""

    trainer: Trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step <= 3 and state.is_world_process_zero:
            report = self.trainer.accelerator.deepspeed_engine_wrapped.zerosync.report
            print(f"step {report.step}: {report.bytes_sent / 1e3:.1f} kB sent, floor {report.floor_bytes / 1e3:.1f} kB")


def main() -> None:
    options = parse_options(__doc__, "lora")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")

    set_seed(0)
    training, validation = pieces(options.pieces, 128)
    model = get_peft_model(small_llama(), LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    arguments = TrainingArguments(
        max_steps=options.steps,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=options.lr,
        max_grad_norm=options.clip,
        logging_steps=10,
        save_steps=options.every,
        output_dir=options.checkpoints,
        dataloader_pin_memory=False,
        report_to="none",
        disable_tqdm=True,
    )
    sent = Sent()
    trainer = Trainer(model, arguments, train_dataset=training, eval_dataset=validation, callbacks=[sent])
    sent.trainer = trainer
    trainer.train(resume_from_checkpoint=options.resume)
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        trained = sum(param.ds_numel for param in model.parameters() if param.requires_grad)
        print(f"{4 * trained / 1e3:.1f} kB of adapters; validation loss at the end {loss}")


if __name__ == "__main__":
    main()
