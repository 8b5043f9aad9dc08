"""What this layer uses of Lightning beyond its interface, verified when a strategy is made (rule C1)."""

from __future__ import annotations

from zerosync_strategy.core.engine.contract import rows

from .library import PACKAGE

_STRATEGY = f"{PACKAGE}.strategies.DeepSpeedStrategy"
_BASE = f"{PACKAGE}.strategies.strategy"
_PRECISION = f"{PACKAGE}.plugins.precision.DeepSpeedPrecision"
_CALLBACKS = f"{PACKAGE}.callbacks"
_AVERAGING = f"{_CALLBACKS}.WeightAveraging"
_FITTING = f"{PACKAGE}.loops.fit_loop"

INIT_OPTIMIZERS, NO_OPTIMIZER = rows(
    "set-up", f"{PACKAGE}.core.optimizer", "_init_optimizers_and_lr_schedulers(model) _MockOptimizer"
)

INTERNALS = (
    # ---- the strategy ----
    *rows("accumulation", _STRATEGY, "handles_gradient_accumulation"),
    *rows("configuration", _STRATEGY, """
        _format_config() _format_batch_size_and_grad_accum_config() _auto_select_batch_size()
    """),
    *rows("configuration", f"{_FITTING}._FitLoop", "_data_source", named_in=_FITTING),
    *rows("configuration", f"{PACKAGE}.trainer.connectors.data_connector._DataLoaderSource", "is_module()"),
    *rows("compiled modules", _STRATEGY, "_lightning_module", named_in=_BASE),
    *rows("compiled modules", f"{PACKAGE}.LightningModule", "_compiler_ctx", named_in=f"{PACKAGE}.core.module"),
    *rows("precision", _STRATEGY, "precision_plugin"),
    *rows("precision", _STRATEGY, "_precision_plugin", named_in=_BASE),
    *rows("training on CPU", _STRATEGY, "setup_environment() setup_distributed() _init_deepspeed_distributed()"),
    *rows("set-up", _STRATEGY, """
        model_sharded_context() setup(trainer) init_deepspeed() _initialize_deepspeed_train(model)
        _setup_model_and_optimizer(model, optimizer, lr_scheduler) _set_deepspeed_activation_checkpointing()
    """),
    INIT_OPTIMIZERS,
    NO_OPTIMIZER,
    *rows("evaluation", _STRATEGY, "_initialize_deepspeed_inference(model)"),
    *rows("checkpoints", _STRATEGY, """
        save_checkpoint(checkpoint, filepath, storage_options) load_checkpoint(checkpoint_path)
        load_model_state_dict(checkpoint, strict) remove_checkpoint(filepath)
    """),
    *rows("end of training", _STRATEGY, "on_train_end() on_exception(exception) teardown()"),
    # ---- precision ----
    *rows("backward", _PRECISION, "backward(tensor, model, optimizer) post_backward(tensor, module)"),
    *rows("optimizer step", _PRECISION, "optimizer_step(optimizer, model, closure) _after_closure(model, optimizer)"),
    *rows("optimizer step", f"{_FITTING}._FitLoop", "_skip_backward"),
    *rows("gradient clipping", _PRECISION, "clip_gradients(optimizer, clip_val, gradient_clip_algorithm)"),
    # ---- callbacks ----
    *rows("monitor", f"{_CALLBACKS}.Callback", """
        setup(trainer, pl_module, stage) teardown(trainer, pl_module, stage) on_train_batch_end(trainer, pl_module)
    """),
    *rows("callbacks", f"{_CALLBACKS}.Callback", "state_key"),
    *rows("accumulation", f"{_CALLBACKS}.GradientAccumulationScheduler", "on_train_start(trainer, pl_module)"),
    *rows("timer", f"{_CALLBACKS}.Timer", "on_train_start(trainer, pl_module) on_fit_start(trainer)"),
    *rows("fine-tuning", f"{_CALLBACKS}.BaseFinetuning", """
        setup(trainer, pl_module, stage) on_fit_start(trainer, pl_module)
    """),
    *rows("fine-tuning", f"{_CALLBACKS}.BaseFinetuning", "_restarting", named_in=f"{_CALLBACKS}.finetuning"),
    *rows("weight averaging", f"{_CALLBACKS}.StochasticWeightAveraging", """
        setup(trainer, pl_module, stage) on_load_checkpoint(trainer, pl_module, checkpoint)
        update_parameters(average_model, model) transfer_weights(src_pl_module, dst_pl_module)
        _clear_schedulers(trainer)
    """),
    *rows("weight averaging", _AVERAGING, """
        setup(trainer, pl_module, stage) on_load_checkpoint(trainer, pl_module, checkpoint) _swap_models(pl_module)
        _copy_average_to_current(pl_module)
    """, since="2.6"),
    *rows("weight averaging", _AVERAGING, "_average_model", named_in=f"{_CALLBACKS}.weight_averaging", since="2.6"),
)  # fmt: skip
