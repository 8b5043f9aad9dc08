"""What this layer uses of Lightning Fabric beyond its interface, verified when a strategy is made (rule C1)."""

from __future__ import annotations

from zerosync_strategy.core.engine.internals import Internal

from .library import PACKAGE

_STRATEGY = f"{PACKAGE}.strategies.DeepSpeedStrategy"
_FABRIC = f"{PACKAGE}.fabric"
_CLIPPING = ("module", "optimizer")

VALIDATE_SETUP_OPTIMIZERS = Internal(
    "later optimizers", f"{_FABRIC}.Fabric", "_validate_setup_optimizers", ("optimizers",)
)

INTERNALS = (
    Internal("precision", _STRATEGY, "precision"),
    Internal("precision", _STRATEGY, "_precision", named_in=f"{PACKAGE}.strategies.strategy"),
    Internal("configuration", _STRATEGY, "_format_config", ()),
    Internal("training on CPU", _STRATEGY, "setup_environment", ()),
    Internal("training on CPU", _STRATEGY, "_setup_distributed", ()),
    Internal("set-up", _STRATEGY, "module_sharded_context", ()),
    Internal("set-up", _STRATEGY, "setup_module_and_optimizers", ("module", "optimizers")),
    Internal("set-up", _STRATEGY, "setup_module", ("module",)),
    Internal("set-up", _STRATEGY, "setup_optimizer", ("optimizer",)),
    Internal("set-up", _STRATEGY, "_initialize_engine", ("model", "optimizer")),
    Internal("set-up", _STRATEGY, "_set_deepspeed_activation_checkpointing", ()),
    VALIDATE_SETUP_OPTIMIZERS,
    Internal("later optimizers", f"{_FABRIC}.Fabric", "_validate_launched", ()),
    Internal("later optimizers", f"{_FABRIC}.Fabric", "_strategy", named_in=_FABRIC),
    # Fabric looks for the first where a program accumulates, and sets the second to the engine of the coming backward.
    Internal("accumulation", _STRATEGY, "_backward_sync_control", named_in=_FABRIC),
    Internal(
        "accumulation", f"{PACKAGE}.strategies.strategy._BackwardSyncControl", "no_backward_sync", ("module", "enabled")
    ),
    Internal("backward", _STRATEGY, "_deepspeed_engine", named_in=_FABRIC),
    Internal("backward", _STRATEGY, "backward", ("tensor", "module")),
    Internal("optimizer step", _STRATEGY, "optimizer_step", ("optimizer",)),
    Internal("gradient clipping", _STRATEGY, "clip_gradients_norm", (*_CLIPPING, "max_norm", "norm_type")),
    Internal("gradient clipping", _STRATEGY, "clip_gradients_value", (*_CLIPPING, "clip_val")),
    Internal("checkpoints", _STRATEGY, "save_checkpoint", ("path", "state", "storage_options", "filter")),
    Internal("checkpoints", _STRATEGY, "load_checkpoint", ("path", "state", "strict")),
    Internal("checkpoints", _STRATEGY, "load_module_state_dict", ("module", "state_dict", "strict")),
    Internal("checkpoints", _STRATEGY, "get_optimizer_state", ("optimizer",)),
    Internal("checkpoints", _STRATEGY, "_convert_stateful_objects_in_state", ("state", "filter")),
)
