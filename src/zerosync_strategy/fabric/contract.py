"""What this layer uses of Lightning Fabric beyond its interface, verified when a strategy is made (rule C1)."""

from __future__ import annotations

from zerosync_strategy.core.engine.contract import rows

from .library import PACKAGE

_STRATEGY = f"{PACKAGE}.strategies.DeepSpeedStrategy"
_BASE = f"{PACKAGE}.strategies.strategy"
_FABRIC = f"{PACKAGE}.fabric"

INTERNALS = (
    *rows("precision", _STRATEGY, "precision"),
    *rows("precision", _STRATEGY, "_precision", named_in=_BASE),
    *rows("configuration", _STRATEGY, "_format_config()"),
    *rows("training on CPU", _STRATEGY, "setup_environment() _setup_distributed()"),
    *rows("set-up", _STRATEGY, """
        module_sharded_context() setup_module_and_optimizers(module, optimizers) setup_module(module)
        setup_optimizer(optimizer) _initialize_engine(model, optimizer) _set_deepspeed_activation_checkpointing()
    """),
    *rows("later optimizers", f"{_FABRIC}.Fabric", "_validate_setup_optimizers(optimizers) _validate_launched()"),
    *rows("later optimizers", f"{_FABRIC}.Fabric", "_strategy", named_in=_FABRIC),
    *rows("backward", f"{_FABRIC}.Fabric", "_models_setup _forward_module", named_in=_FABRIC),
    *rows("backward", f"{_FABRIC}.Fabric", "+backward(tensor, args, model)"),
    # Fabric needs the first to accumulate, and sets the third to the engine of the next backward.
    *rows("accumulation", _STRATEGY, "_backward_sync_control", named_in=_FABRIC),
    *rows("accumulation", f"{_BASE}._BackwardSyncControl", "no_backward_sync(module, enabled)"),
    *rows("backward", _STRATEGY, "_deepspeed_engine", named_in=_FABRIC),
    *rows("backward", _STRATEGY, "backward(tensor, module)"),
    *rows("optimizer step", _STRATEGY, "optimizer_step(optimizer)"),
    *rows("gradient clipping", _STRATEGY, """
        clip_gradients_norm(module, optimizer, max_norm, norm_type) clip_gradients_value(module, optimizer, clip_val)
    """),
    *rows("checkpoints", _STRATEGY, """
        save_checkpoint(path, state, storage_options, filter) load_checkpoint(path, state, strict)
        load_module_state_dict(module, state_dict, strict) get_optimizer_state(optimizer)
        _convert_stateful_objects_in_state(state, filter)
    """),
)  # fmt: skip
