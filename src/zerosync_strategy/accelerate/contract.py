"""What this layer uses of Accelerate and transformers beyond their interfaces, verified when it is used (rule C1)."""

from __future__ import annotations

from zerosync_strategy.core.engine.internals import Internal

_ACCELERATOR = "accelerate.accelerator.Accelerator"
_PLUGIN = "accelerate.utils.DeepSpeedPlugin"
_ENGINE = "accelerate.utils.deepspeed.DeepSpeedEngineWrapper"
_OPTIMIZER = "accelerate.utils.deepspeed.DeepSpeedOptimizerWrapper"

INTERNALS = (
    Internal("preparation", _ACCELERATOR, "_prepare_deepspeed", ()),
    Internal("preparation", _ACCELERATOR, "deepspeed_engine_wrapped", named_in="accelerate.accelerator"),
    Internal("gradient clipping", _ACCELERATOR, "clip_grad_norm_", ("parameters", "max_norm")),
    Internal("gradient clipping", _ACCELERATOR, "clip_grad_value_", ("parameters", "clip_value")),
    Internal("checkpoints", _ACCELERATOR, "save_state", ("output_dir",)),
    Internal("end of training", _ACCELERATOR, "end_training", ()),
    Internal("a second training", _ACCELERATOR, "free_memory", ()),
    Internal("gradient accumulation", _ACCELERATOR, "sync_gradients"),
    Internal("backward", _ENGINE, "backward", ("loss",)),
    Internal("gradient norm", _ENGINE, "get_global_grad_norm", ()),
    Internal("optimizer step", _OPTIMIZER, "step", ()),
    Internal("zero_grad", _OPTIMIZER, "zero_grad", ()),
    Internal("configuration", _PLUGIN, "__post_init__", ()),
    Internal("configuration", _PLUGIN, "is_auto", ()),
    Internal("configuration", _PLUGIN, "set_deepspeed_weakref", ()),
    Internal("configuration", "accelerate.utils.deepspeed.HfDeepSpeedConfig", "get_value", ()),
    Internal("gradient accumulation", "accelerate.state.GradientState", "num_steps"),
    Internal("training on CPU", "accelerate.state.PartialState", "_prepare_backend", ("cpu",)),
)

DEEPSPEED_INIT = Internal(
    "training with the Trainer", "transformers.integrations.deepspeed", "deepspeed_init",
    ("trainer", "num_training_steps", "inference"),
)  # fmt: skip
TRAINER = (
    DEEPSPEED_INIT,
    Internal("training with the Trainer", "transformers.trainer", "deepspeed_init", named_in="transformers.trainer"),
)
