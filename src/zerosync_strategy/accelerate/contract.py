"""What this layer uses of Accelerate and transformers beyond their interfaces, verified when it is used (rule C1)."""

from __future__ import annotations

from zerosync_strategy.core.engine.contract import rows

_ACCELERATOR = "accelerate.accelerator.Accelerator"
_ENGINE = "accelerate.utils.deepspeed.DeepSpeedEngineWrapper"
_OPTIMIZER = "accelerate.utils.deepspeed.DeepSpeedOptimizerWrapper"

INTERNALS = (
    *rows("preparation", _ACCELERATOR, "_prepare_deepspeed()"),
    *rows("preparation", _ACCELERATOR, "deepspeed_engine_wrapped", named_in="accelerate.accelerator"),
    *rows("gradient clipping", _ACCELERATOR, """
        clip_grad_norm_(parameters, max_norm) clip_grad_value_(parameters, clip_value)
    """),
    *rows("checkpoints", _ACCELERATOR, "save_state(output_dir)"),
    *rows("end of training", _ACCELERATOR, "end_training()"),
    *rows("a second training", _ACCELERATOR, "free_memory()"),
    *rows("gradient accumulation", "accelerate.state.GradientState", "num_steps"),
    *rows("backward", _ENGINE, "backward(loss)"),
    *rows("gradient norm", _ENGINE, "get_global_grad_norm()"),
    *rows("optimizer step", _OPTIMIZER, "step() zero_grad()"),
    *rows("configuration", "accelerate.utils.DeepSpeedPlugin", "__post_init__() is_auto() set_deepspeed_weakref()"),
    *rows("configuration", "accelerate.utils.deepspeed.HfDeepSpeedConfig", "get_value()"),
    *rows("training on CPU", "accelerate.state.PartialState", "_prepare_backend(cpu)"),
)  # fmt: skip
TRAINER = (
    *rows("training with the Trainer", "transformers.integrations.deepspeed",
          "deepspeed_init(trainer, num_training_steps, inference)"),
    *rows("training with the Trainer", "transformers.trainer", "deepspeed_init", named_in="transformers.trainer"),
    *rows("saving of the Trainer's module", "transformers.trainer.Trainer", "_save(output_dir, state_dict)"),
    *rows("checkpoints in the background", "transformers.trainer.Trainer", "_save_checkpoint() _load_best_model()"),
)  # fmt: skip
