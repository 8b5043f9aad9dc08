"""What this layer uses of Lightning beyond its interface, verified when a strategy is made (rule C1)."""

from __future__ import annotations

from zerosync_strategy.core.engine.internals import Internal

from .library import PACKAGE

_STRATEGY = f"{PACKAGE}.strategies.DeepSpeedStrategy"
_BASE = f"{PACKAGE}.strategies.strategy"
_PRECISION = f"{PACKAGE}.plugins.precision.DeepSpeedPrecision"
_OPTIMIZER = f"{PACKAGE}.core.optimizer"
_CALLBACKS = f"{PACKAGE}.callbacks"
_AVERAGING = f"{_CALLBACKS}.WeightAveraging"
_SWA = f"{_CALLBACKS}.StochasticWeightAveraging"
_FITTING = f"{PACKAGE}.loops.fit_loop"

INIT_OPTIMIZERS = Internal("set-up", _OPTIMIZER, "_init_optimizers_and_lr_schedulers", ("model",))
NO_OPTIMIZER = Internal("set-up", _OPTIMIZER, "_MockOptimizer")

INTERNALS = (
    # ---- the strategy ----
    Internal("accumulation", _STRATEGY, "handles_gradient_accumulation"),
    Internal("configuration", _STRATEGY, "_format_config", ()),
    Internal("configuration", _STRATEGY, "_format_batch_size_and_grad_accum_config", ()),
    Internal("configuration", _STRATEGY, "_auto_select_batch_size", ()),
    Internal("configuration", f"{_FITTING}._FitLoop", "_data_source", named_in=_FITTING),
    Internal("configuration", f"{PACKAGE}.trainer.connectors.data_connector._DataLoaderSource", "is_module", ()),
    Internal("compiled modules", _STRATEGY, "_lightning_module", named_in=_BASE),
    Internal("compiled modules", f"{PACKAGE}.LightningModule", "_compiler_ctx", named_in=f"{PACKAGE}.core.module"),
    Internal("precision", _STRATEGY, "precision_plugin"),
    Internal("precision", _STRATEGY, "_precision_plugin", named_in=_BASE),
    Internal("training on CPU", _STRATEGY, "setup_environment", ()),
    Internal("training on CPU", _STRATEGY, "setup_distributed", ()),
    Internal("training on CPU", _STRATEGY, "_init_deepspeed_distributed", ()),
    Internal("set-up", _STRATEGY, "model_sharded_context", ()),
    Internal("set-up", _STRATEGY, "setup", ("trainer",)),
    Internal("set-up", _STRATEGY, "init_deepspeed", ()),
    Internal("set-up", _STRATEGY, "_initialize_deepspeed_train", ("model",)),
    Internal("set-up", _STRATEGY, "_setup_model_and_optimizer", ("model", "optimizer", "lr_scheduler")),
    Internal("set-up", _STRATEGY, "_set_deepspeed_activation_checkpointing", ()),
    INIT_OPTIMIZERS,
    NO_OPTIMIZER,
    Internal("evaluation", _STRATEGY, "_initialize_deepspeed_inference", ("model",)),
    Internal("checkpoints", _STRATEGY, "save_checkpoint", ("checkpoint", "filepath", "storage_options")),
    Internal("checkpoints", _STRATEGY, "load_checkpoint", ("checkpoint_path",)),
    Internal("checkpoints", _STRATEGY, "load_model_state_dict", ("checkpoint", "strict")),
    Internal("end of training", _STRATEGY, "on_train_end", ()),
    Internal("end of training", _STRATEGY, "on_exception", ("exception",)),
    Internal("end of training", _STRATEGY, "teardown", ()),
    # ---- precision ----
    Internal("backward", _PRECISION, "backward", ("tensor", "model", "optimizer")),
    Internal("backward", _PRECISION, "post_backward", ("tensor", "module")),
    Internal("optimizer step", _PRECISION, "optimizer_step", ("optimizer", "model", "closure")),
    Internal("optimizer step", _PRECISION, "_after_closure", ("model", "optimizer")),
    Internal("optimizer step", f"{_FITTING}._FitLoop", "_skip_backward"),
    Internal("gradient clipping", _PRECISION, "clip_gradients", ("optimizer", "clip_val", "gradient_clip_algorithm")),
    # ---- callbacks ----
    Internal("monitor", f"{_CALLBACKS}.Callback", "setup", ("trainer", "pl_module", "stage")),
    Internal("monitor", f"{_CALLBACKS}.Callback", "teardown", ("trainer", "pl_module", "stage")),
    Internal("monitor", f"{_CALLBACKS}.Callback", "on_train_batch_end", ("trainer", "pl_module")),
    Internal("callbacks", f"{_CALLBACKS}.Callback", "state_key"),
    Internal("accumulation", f"{_CALLBACKS}.GradientAccumulationScheduler", "on_train_start", ("trainer", "pl_module")),
    Internal("timer", f"{_CALLBACKS}.Timer", "on_train_start", ("trainer", "pl_module")),
    Internal("timer", f"{_CALLBACKS}.Timer", "on_fit_start", ("trainer",)),
    Internal("fine-tuning", f"{_CALLBACKS}.BaseFinetuning", "setup", ("trainer", "pl_module", "stage")),
    Internal("fine-tuning", f"{_CALLBACKS}.BaseFinetuning", "on_fit_start", ("trainer", "pl_module")),
    Internal(
        "fine-tuning", f"{_CALLBACKS}.BaseFinetuning", "_restarting", named_in=f"{_CALLBACKS}.finetuning"
    ),
    Internal("weight averaging", _SWA, "setup", ("trainer", "pl_module", "stage")),
    Internal("weight averaging", _SWA, "on_load_checkpoint", ("trainer", "pl_module", "checkpoint")),
    Internal("weight averaging", _SWA, "update_parameters", ("average_model", "model")),
    Internal("weight averaging", _SWA, "transfer_weights", ("src_pl_module", "dst_pl_module")),
    Internal("weight averaging", _SWA, "_clear_schedulers", ("trainer",)),
    Internal("weight averaging", _AVERAGING, "setup", ("trainer", "pl_module", "stage"), since="2.6"),
    Internal("weight averaging", _AVERAGING, "on_load_checkpoint", ("trainer", "pl_module", "checkpoint"), since="2.6"),
    Internal("weight averaging", _AVERAGING, "_swap_models", ("pl_module",), since="2.6"),
    Internal("weight averaging", _AVERAGING, "_copy_average_to_current", ("pl_module",), since="2.6"),
    Internal(
        "weight averaging", _AVERAGING, "_average_model", named_in=f"{_CALLBACKS}.weight_averaging", since="2.6"
    ),
)  # fmt: skip
