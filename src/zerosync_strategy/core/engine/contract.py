"""The DeepSpeed internals that ZeroSync uses: tables by feature and release, verified on the live engine (rule C1).

Only the files of this folder touch DeepSpeed's internals, and each internal that they touch is in a table here. So a
release that lacks one, or has changed it, is an error with a name before any training.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zerosync_strategy.core.engine import internals, torch_internals
from zerosync_strategy.core.engine.internals import DEEPSPEED, ContractError, Internal, is_before, release_of

_COORDINATOR = "_PartitionedParameterCoordinator__"
GRADIENT_SHARDS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
RELEASES = f"{_COORDINATOR}params_to_release"
ALL_GATHER_PARAMS = f"{_COORDINATOR}all_gather_params"
GATHER_STREAM = f"{_COORDINATOR}allgather_stream"
IN_FLIGHT = f"{_COORDINATOR}inflight_param_registry"
GATHERED_NUMEL = f"{_COORDINATOR}n_available_params"
RELEASE_PARAM = f"{_COORDINATOR}release_param"
OFFLOAD_GATHER_STREAM = "_DeepSpeedZeRoOffload__allgather_stream"

_ENGINE_MODULE = "deepspeed.runtime.engine"
_LINKAGE = "deepspeed.utils.mixed_precision_linkage"
_STAGE_1_2_MODULE = "deepspeed.runtime.zero.stage_1_and_2"
_STAGE_3_MODULE = "deepspeed.runtime.zero.stage3"
_PARTITION_MODULE = "deepspeed.runtime.zero.partition_parameters"
_INIT = f"{_PARTITION_MODULE}.Init"
_COORDINATOR_MODULE = "deepspeed.runtime.zero.partitioned_param_coordinator"
_OFFLOAD_MODULE = "deepspeed.runtime.zero.parameter_offload"
_LINEAR_MODULE = "deepspeed.runtime.zero.linear"

# What not every release has, or not as it is needed: code asks has() and does otherwise, or need() where it cannot.
CLEAR_BACKWARD = Internal("window", "optimizer", "clear_backward_seen_flag", (), since="0.18.5")
SEQUENTIAL_GATHERS = Internal("gathers", "zero config", "allgather_sequential", public=True, since="0.18.5")
COMPILE_BACKEND = Internal("DeepCompile", "engine", "get_deepcompile_backend", since="0.18.9")
LEFTOVERS = Internal("unsharding on read", "coordinator", "release_backward_leftovers", (), since="0.19.3")
ORDERED_DICT = Internal("unsharding on read", _OFFLOAD_MODULE, "ensure_zero_ordered_dict", since="0.19.1")
PARAM_GROUP = Internal("shard_over()", "optimizer", "_get_param_partition_group", ("param",), since="0.19.3")
AVERAGED_RANKS = Internal(
    "reduction", "optimizer", "_gradient_averaging_world_size", ("params", "partition_world_size"), since="0.19.3"
)
STEPPED_OFFLOADED = Internal(
    "reduction with an optimizer on NVMe", "optimizer", "_offload_boundary_param_ids", since="0.19.5"
)
ASYNC_MESSAGES = Internal("reduction", "deepspeed.comm.comm", "isend", ("tensor", "dst"), public=True, since="0.19.6")
AVERAGES = Internal("reduction", "optimizer", "gradient_average", since="0.19.6")
WHOLE_GATHER = Internal(
    "gathers", "parameter", "all_gather", ("param_list", "async_op", "hierarchy"), public=True, since="0.19.8"
)
MARKED_GRADIENT = Internal(
    "access to shards", "parameter", "_hp_grad", named_in="deepspeed.utils.tensor_fragment", since="0.19.8"
)
COMPUTES_NORM = Internal(
    "gradient clipping", "optimizer", "compute_grad_norm", named_in=_STAGE_1_2_MODULE, since="0.19.8"
)

CONFIGURATION = (Internal("configuration", "engine", "_config"),)
ALL_STAGES = (
    Internal("window", _STAGE_1_2_MODULE, "count_used_parameters_in_backward", ("parameters",)),
    Internal("window", _STAGE_3_MODULE, "count_used_parameters_in_backward", ("parameters",)),
    Internal("window", "engine", "backward", ("loss",), public=True),
    Internal("window", "engine", "step", public=True),
    Internal("window", "engine", "zero_grad", (), public=True),
    Internal("window", "engine", "allreduce_gradients"),
    Internal("window", "engine", "_backward_prologue", ()),
    Internal("window", "engine", "is_gradient_accumulation_boundary", (), public=True),
    Internal("window", "engine", "no_sync", (), public=True),
    Internal("window", "engine", "coalesce_grad_reduction", (), public=True, since="0.19.1"),
    Internal("window", "engine", "destroy", (), public=True),
    Internal("unused parameters", "engine", "zero_ignore_unused_parameters", ()),
    Internal("window", "engine config", "_param_dict"),
    Internal("window", "optimizer", "step", public=True),
    Internal("window", "optimizer", "optimizer", public=True),
    Internal("window", "optimizer", "add_param_group", public=True, optional=True),
    Internal("window", "optimizer", "zero_grad", ("set_to_none",), public=True),
    Internal("window", "optimizer", "finalize_gradient_accumulation_boundary", (), since="0.19.4"),
    Internal("window", "optimizer", "_backward_active_depth"),
    CLEAR_BACKWARD,
    Internal("checkpoints", "engine", "save_checkpoint", ("save_dir", "tag", "client_state"), public=True),
    Internal(
        "checkpoints",
        "engine",
        "load_checkpoint",
        (
            "load_dir",
            "tag",
            "load_module_strict",
            "load_optimizer_states",
            "load_lr_scheduler_states",
            "load_module_only",
        ),
        public=True,
    ),
    Internal("checkpoints", "engine", "load_universal_checkpoint", ()),
    Internal("checkpoints", "engine", "global_rank", public=True),
    Internal("checkpoints", "engine", "global_steps", public=True),
    Internal("checkpoints", "engine", "mp_world_size", public=True),
    Internal("checkpoints", "engine", "checkpoint_engine", public=True),
    Internal("checkpoints", "deepspeed.runtime.checkpoint_engine", "TorchCheckpointEngine"),
    Internal("checkpoints", "checkpoint engine", "save", ("state_dict", "path"), public=True),
    Internal("checkpoints", "engine", "_copy_recovery_script", ("save_path",)),
    Internal("checkpoints", "engine", "_get_ckpt_name", ("checkpoints_path", "tag")),
    Internal("checkpoints", "engine", "_get_zero_ckpt_name", ("checkpoints_path", "tag")),
    Internal("reduction", "optimizer", "averaged_gradients"),
    Internal("reduction", "optimizer", "dtype", public=True),
    Internal("reduction", "optimizer", "dp_process_group"),
    Internal("reduction", "optimizer", "gradient_accumulation_dtype"),
    Internal("reduction", "optimizer", "communication_data_type", public=True),
    Internal("reduction", "optimizer", "gradient_predivide_factor", public=True),
    Internal("reduction", "optimizer", "reduce_bucket_size", public=True),
    Internal("reduction", "parameter", "grad_accum", named_in=_STAGE_1_2_MODULE),
    MARKED_GRADIENT,
    Internal("access to shards", "deepspeed.utils.tensor_fragment", "safe_get_full_grad", ("param",), public=True),
    Internal("gradient clipping", "optimizer", "clip_grad"),
    COMPUTES_NORM,
    Internal("gradient norm", "optimizer", "loss_scale", public=True),
    COMPILE_BACKEND,
    Internal("DeepCompile", "engine", "is_deepcompile_enabled", ()),
    Internal("DeepCompile", "engine", "is_deepcompile_active", ()),
    Internal("report", "deepspeed.comm.comm", "cdb"),
    Internal("collectives", "comm backend", "all_gather_function", optional=True),
    Internal("collectives", "comm backend", "reduce_scatter_function", optional=True),
    ASYNC_MESSAGES,
)
ACCUMULATION = (
    Internal("gradient accumulation", "engine config", "train_batch_size", public=True),
    Internal("gradient accumulation", "engine config", "gradient_accumulation_steps", public=True),
)
STAGE_1_2 = (
    Internal("window", "optimizer", "process_gradients", ("param", "i")),
    Internal("reduction", "optimizer", "bit16_groups"),
    Internal("reduction", "optimizer", "bit16_groups_flat"),
    Internal("reduction", "optimizer", "setup_buckets", ()),
    Internal("reduction", "optimizer", "contiguous_gradients", public=True),
    Internal("reduction", "optimizer", "partition_size"),
    Internal("reduction", "optimizer", "real_dp_process_group"),
    AVERAGES,
    Internal("reduction", "optimizer", "cpu_offload"),
    Internal("gradient norm", "optimizer", "scaled_global_norm", ()),
    Internal("gradient norm", "optimizer", "has_moe_layers"),
    Internal("gradient norm", "optimizer", "_average_expert_grad_norms", ("norm_groups",)),
    Internal("gradient norm", "optimizer", "model_parallel_rank"),
    Internal("gradient norm", "optimizer", "_model_parallel_all_reduce", ("tensor", "op")),
    Internal("gradient norm", "deepspeed.runtime.utils", "is_model_parallel_parameter", ("p",)),
    Internal("checkpoints", "optimizer", "state_dict", (), public=True),
    Internal("checkpoints", "optimizer", "load_state_dict", public=True),
    Internal("checkpoints", "optimizer", "refresh_fp32_params", ()),
    Internal("access to shards", "optimizer", "_link_all_hp_params", ()),
    Internal("access to shards", "parameter", "get_full_hp_param", named_in=_LINKAGE),
    Internal("access to shards", "parameter", "get_full_hp_grad", named_in=_LINKAGE),
    Internal("access to shards", "parameter", "set_full_hp_grad", named_in=_LINKAGE),
    Internal("access to shards", "parameter", "set_full_hp_param", named_in=_LINKAGE),
    Internal("edited parameters", "optimizer", "parallel_partitioned_bit16_groups"),
    Internal("edited parameters", "optimizer", "single_partition_of_fp32_groups"),
    Internal("frozen parameters", "optimizer", "_hp_optimizer_states_linked", named_in=_STAGE_1_2_MODULE),
    Internal(
        "parameter gather", _STAGE_1_2_MODULE, "all_gather_dp_groups",
        ("groups_flat", "partitioned_param_groups", "dp_process_group"),
    ),
    Internal("parameter gather", "optimizer", "_update_model_bit16_weights", ("group_index",)),
    Internal("DeepCompile", "optimizer", "get_param_id", ("param",)),
)  # fmt: skip
STAGE_1_2_OFFLOAD = (
    Internal("reduction with an offloaded optimizer", "optimizer", "param_buffer_of_bit16_for_cpu_offload_groups"),
    Internal("reduction with an offloaded optimizer", "optimizer", "update_offload_overflow_tracker", ("grad",)),
)
STAGE_3 = (
    Internal("reduction", "optimizer", "ipg_buckets"),
    Internal("window", "optimizer", "reduce_ready_partitions_and_remove_grads", ("param",)),
    Internal("reduction", "optimizer", "fp16_groups"),
    Internal("reduction", "optimizer", "offload_optimizer"),
    Internal("reduction", "optimizer", "swap_optimizer", named_in=_STAGE_3_MODULE),
    STEPPED_OFFLOADED,
    PARAM_GROUP,
    AVERAGED_RANKS,
    Internal("reduction", "optimizer", GRADIENT_SHARDS),
    Internal("reduction", "parameter", "ds_id"),
    Internal("reduction", "parameter", "ds_numel"),
    Internal("reduction", "parameter", "partition_numel", ()),
    Internal("gradient norm", "optimizer", "_get_norm_groups", ()),
    Internal("gradient norm", "optimizer", "model_parallel_group"),
    Internal("overflow check", "optimizer", "has_overflow", ("partition_gradients",)),
    Internal("overflow check", "optimizer", "reduce_and_partition_stream"),
    Internal("step", "optimizer", "unscale_and_clip_grads", ("sub_group_id", "total_norm")),
    Internal("access to shards", "parameter", "_z3_optimizer", named_in=_STAGE_3_MODULE),
    Internal("access to shards", "optimizer", "get_local_fp32_param", ("param",)),
    Internal("access to shards", "optimizer", "get_fp32_grad_for_param", ("param",)),
    Internal("access to shards", "optimizer", "set_fp32_grad_for_param", ("value", "param")),
    Internal("access to shards", "optimizer", "get_local_fp32_grad_for_param", ("param",)),
    Internal("access to shards", "optimizer", "set_local_grad_for_param", ("value", "param")),
    Internal("access to shards", "optimizer", "update_fp32_grad_for_param_vectorized", ("update_func", "param_list")),
    Internal("access to shards", "optimizer", "set_full_hp_param", ("value", "param", "optim_state_key")),
    Internal("access to shards", "optimizer", "set_local_hp_param", ("value", "param", "optim_state_key")),
    Internal("edited parameters", "optimizer", "fp16_partitioned_groups_flat"),
    Internal("edited parameters", "optimizer", "fp32_partitioned_groups_flat"),
    Internal("edited parameters", "parameter", "ds_tensor"),
    Internal("frozen parameters", "optimizer", "backup_optimizer", named_in=_STAGE_3_MODULE),
    Internal("full parameters", "optimizer", "refresh_fp32_params", ()),
    Internal("full parameters", "engine", "_zero3_consolidated_16bit_state_dict"),
    Internal("checkpoints", "optimizer", "checkpoint_event_prologue", ()),
    Internal("gathers", "optimizer", "parameter_offload"),
    Internal("gathers", "zero config", "use_all_reduce_for_fetch_params"),
    Internal("gathers", "offload", "get_param_coordinator", ()),
    Internal("gathers", "coordinator", ALL_GATHER_PARAMS, ("params", "forward")),
    Internal("gathers", "coordinator", GATHER_STREAM),
    Internal("gathers", "coordinator", IN_FLIGHT),
    Internal("gathers", "coordinator", GATHERED_NUMEL),
    Internal("gathers", "zero config", "zero_quantized_weights", public=True),
    SEQUENTIAL_GATHERS,
    Internal("gathers", "parameter", "ds_secondary_tensor"),
    Internal("gathers", _PARTITION_MODULE, "get_allgather_dtype", ("param", "param_ds_tensor")),
    Internal("gathers", _PARTITION_MODULE, "ZeroParamStatus"),
    Internal("gathers", "parameter", "ds_status"),
    Internal("gathers", "parameter", "ds_process_group"),
    Internal("gathers", "parameter", "ds_shape"),
    Internal("gathers", "parameter", "ds_persist"),
    Internal("gathers", _PARTITION_MODULE, "_dist_allgather_fn", ("input_tensor", "output_tensor", "group")),
    Internal("gathers", _PARTITION_MODULE, "GatheredParameters", ("params",), public=True),
    Internal("gathers", f"{_PARTITION_MODULE}.GatheredParameters", "enabled", public=True, named_in=_PARTITION_MODULE),
    Internal("gathers", f"{_PARTITION_MODULE}.GatheredParameters", "params", public=True, named_in=_PARTITION_MODULE),
    Internal("gathers", f"{_PARTITION_MODULE}.GatheredParameters", "src_rank", public=True, named_in=_PARTITION_MODULE),
    Internal("gathers", "parameter", "all_gather_coalesced", ("params",), public=True),
    Internal("gathers", "parameter", "ds_quant_scale", named_in=_PARTITION_MODULE),
    Internal("held parameters", "coordinator", "reset_step", ()),
    Internal("held parameters", "optimizer", "_partition_all_parameters", ()),
    Internal("held parameters", "coordinator", "fetch_sub_module", ("current_submodule", "forward")),
    Internal("gathers", "coordinator", "release_sub_module", ("submodule",)),
    Internal("held parameters", "coordinator", "release_and_reset_all", ("module",)),
    Internal("held parameters", "coordinator", RELEASE_PARAM, ("param", "free_data")),
    Internal("held parameters", "engine", "module_forward_pre_hook"),
    Internal("held parameters", "engine", "module_forward_post_hook"),
    Internal("held parameters", "offload", "forward_hooks"),
    Internal("held parameters", "offload", "backward_hooks"),
    Internal("held parameters", "offload", "fwd_pre_hook"),
    Internal("held parameters", "zero config", "prefetch_bucket_size", public=True),
    Internal("held parameters", _PARTITION_MODULE, "free_param", ("param",)),
    Internal("held parameters", _LINEAR_MODULE, "LinearFunctionForZeroStage3"),
    Internal("held parameters", "module", "pre_bwd_fn", named_in=_OFFLOAD_MODULE),
    Internal("held parameters", "module", "post_bwd_fn", named_in=_OFFLOAD_MODULE),
    Internal("held parameters", "coordinator", "_invalidate_trace", ()),
    Internal("held parameters", "coordinator", RELEASES),
    Internal("held parameters", "parameter", "ds_active_sub_modules"),
    Internal("held parameters", _COORDINATOR_MODULE, "iter_params", ("module", "recurse")),
    Internal("held parameters", _COORDINATOR_MODULE, "z3_leaf_module", ("model",)),
    WHOLE_GATHER,
    Internal(
        "values of sharded parameters",
        "parameter",
        "partition",
        ("param_list", "hierarchy", "has_been_updated"),
        public=True,
    ),
    Internal(
        "values of sharded parameters",
        "parameter",
        "_ds_z3_gathered_param_context_depth",
        named_in=_PARTITION_MODULE,
        since="0.19.4",
    ),
    Internal("shard_over", "parameter", "ds_zero_partition_process_group", named_in=_PARTITION_MODULE, since="0.19.3"),
    Internal("shard_over", "parameter", "ds_zero_param_process_group", named_in=_PARTITION_MODULE),
    Internal("shard_over", "parameter", "ds_optim_param", named_in=_ENGINE_MODULE),
)
STAGE_3_OFFLOAD = (
    Internal("reduction with an offloaded optimizer", "optimizer", "get_param_id", ("param",), until="0.19.5"),
    Internal("reduction with an offloaded optimizer", "optimizer", "grad_position", until="0.19.5"),
    Internal("reduction with an offloaded optimizer", "optimizer", "norm_for_param_grads", until="0.19.5"),
)
UNSHARD_ON_READ = (
    Internal("unsharding on read", "engine", "param_names"),
    Internal("unsharding on read", "engine", "_create_module_forward_pre_hook", ()),
    Internal("unsharding on read", "engine", "_create_module_forward_post_hook", ()),
    LEFTOVERS,
    Internal("unsharding on read", "offload", "_remove_module_hooks", ()),
    Internal("unsharding on read", "offload", "setup_zero_stage3_hooks", ()),
    Internal("unsharding on read", "coordinator", "is_invalid_trace", ()),
    Internal("unsharding on read", "parameter", "all_gather_coalesced", ("params",), public=True),
    Internal("unsharding on read", "parameter", "partition", ("param_list",), public=True),
    Internal("unsharding on read", _OFFLOAD_MODULE, "ZeROOrderedDict"),
    Internal("unsharding on read", f"{_OFFLOAD_MODULE}.ZeROOrderedDict", "_in_forward", named_in=_OFFLOAD_MODULE),
    Internal("unsharding on read", _OFFLOAD_MODULE, "FWD_MODULE_STACK"),
    ORDERED_DICT,
    Internal("unsharding on read", _LINEAR_MODULE, "zero3_linear_wrap"),
)
SEVERAL_ENGINES = (
    Internal("several engines over one module", "optimizer", "module", public=True),
    Internal("several engines over one module", "optimizer", "persistent_parameters"),
    Internal("several engines over one module", "offload", "module", public=True),
    Internal("several engines over one module", "offload", "persistent_parameters"),
    Internal("several engines over one module", "offload", "param_coordinator"),
    Internal("several engines over one module", "offload", OFFLOAD_GATHER_STREAM),
    Internal("several engines over one module", _PARTITION_MODULE, "_init_external_params"),
)
NESTED_ZERO_INIT = (
    Internal("zero.Init inside another one", _PARTITION_MODULE, "top_level_context"),
    Internal("zero.Init inside another one", _INIT, "ds_process_group", named_in=_PARTITION_MODULE),
    Internal("zero.Init inside another one", _INIT, "dp_world_size", named_in=_PARTITION_MODULE),
    Internal("zero.Init inside another one", _INIT, "enabled", named_in=_PARTITION_MODULE, public=True),
)
SCALARS = (
    Internal("parameters without dimensions", f"{_ENGINE_MODULE}.DeepSpeedEngine", "_broadcast_model", ()),
    Internal(
        "parameters in any memory layout",
        f"{_ENGINE_MODULE}.DeepSpeedEngine",
        "_configure_distributed_model",
        ("model",),
    ),
    Internal("parameters without dimensions", _INIT, "_zero_init_param", ("param",)),
)
UNIVERSAL = (Internal("universal checkpoints", "engine", "loaded_checkpoint_dp_world_size"),)
EVALUATION = (Internal("evaluation", "offload", "_restore_from_bit16_weights", named_in=_ENGINE_MODULE),)
DEEPCOMPILE = (
    Internal("DeepCompile", "deepspeed.compile.util", "pre_backward_hooks"),
    Internal("DeepCompile", "deepspeed.compile.backend", "remaining_schedule"),
)
RACE_CHECK = (Internal("race check", "engine", "zero_overlap_comm", ()),)
RACE_CHECK_STAGE_1_2 = (Internal("race check", "optimizer", "reduction_stream"),)
RACE_CHECK_STAGE_3 = (
    Internal("race check", "optimizer", "reduce_and_partition_stream"),
    Internal("race check", "offload", OFFLOAD_GATHER_STREAM),
    Internal("race check", "coordinator", GATHER_STREAM),
)
# Marks of configurations that ZeroSync refuses; an engine that lacks one is not so configured.
_REFUSED = (
    Internal("window", "engine", "zenflow", named_in=_ENGINE_MODULE),
    Internal("window", "engine", "zero_quantized_gradients", (), named_in=_ENGINE_MODULE),
    Internal("window", "engine", "_autoep_folding_spec", optional=True),
    Internal("window", "parameter", "use_muon", named_in=_ENGINE_MODULE),
)
EVERY_TABLE = (
    CONFIGURATION, ALL_STAGES, ACCUMULATION, STAGE_1_2, STAGE_1_2_OFFLOAD, STAGE_3, STAGE_3_OFFLOAD, UNSHARD_ON_READ,
    SEVERAL_ENGINES, NESTED_ZERO_INIT, SCALARS, UNIVERSAL, EVALUATION, DEEPCOMPILE, RACE_CHECK, RACE_CHECK_STAGE_1_2,
    RACE_CHECK_STAGE_3, _REFUSED,
)  # fmt: skip


def internals_of(engine: Any) -> tuple[Internal, ...]:
    """Return what ZeroSync uses on an engine of this stage and configuration, optional features left out."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        of_stage: tuple[Internal, ...] = STAGE_3
        offloaded: tuple[Internal, ...] = STAGE_3_OFFLOAD if getattr(optimizer, "offload_optimizer", False) else ()
    else:
        of_stage = STAGE_1_2
        offloaded = STAGE_1_2_OFFLOAD if getattr(optimizer, "cpu_offload", False) else ()
    return (*ALL_STAGES, *_REFUSED, *of_stage, *offloaded)


def has(internal: Internal) -> bool:
    """Return whether the installed DeepSpeed is of a release that has ``internal``."""
    return internal.applies_to(release_of("deepspeed"))


def need(internal: Internal, remedy: str) -> None:
    """Check that the installed DeepSpeed is of a release that has ``internal``, without which its feature cannot be.

    Args:
        internal: with ``since``.
        remedy: what to do on an older release.

    Raises:
        ContractError: the release is older.
    """
    if not has(internal):
        raise ContractError(
            f"ZeroSync's {internal.feature} needs DeepSpeed {internal.since} or newer, the first with"
            f" {internal.name!r}; found {release_of('deepspeed')}. Install a newer DeepSpeed, or {remedy}."
        )


def check_release() -> None:
    """Check that the installed DeepSpeed is not too old.

    Raises:
        ContractError: it is.
    """
    found = release_of("deepspeed")
    if is_before(found, DEEPSPEED.oldest):
        raise ContractError(
            f"ZeroSync needs DeepSpeed {DEEPSPEED.oldest} or newer, found {found}. DeepSpeed 0.17 and"
            " older reduce gradients inside of engine.backward() and do not notice a loss.backward() of the program;"
            " what later releases have for it changed until 0.18.4. Install a newer DeepSpeed, or train without"
            " ZeroSync."
        )


def verify(engine: Any) -> None:
    """Check that ``engine`` is one that ZeroSync supports and has every internal that ZeroSync uses on it.

    Raises:
        TypeError: ``engine`` is not a ``DeepSpeedEngine``.
        ValueError: the engine is configured in a way that ZeroSync does not support.
        ContractError: an internal is missing or has changed.
    """
    check_release()
    internals.verify(torch_internals.TRAINING)
    _check_supported(engine)
    require(internals_of(engine), engine)
    _check_needed(engine)
    if engine.is_deepcompile_active():
        raise ValueError(
            "attach() found an engine that DeepCompile has compiled already, and its graphs reduce gradients by"
            " themselves. Call engine.compile() after attach()."
        )


def require(table: Iterable[Internal], engine: Any = None) -> None:
    """Check that DeepSpeed has the internals of ``table``, on ``engine`` or in its modules.

    Raises:
        ContractError: one is missing or has changed.
    """
    for internal in table:
        if internal.optional or not internal.applies_to(release_of("deepspeed")):
            continue
        in_source = internal.named_in or _is_path(internal.owner)
        owner = internal.owner if in_source else _owner(engine, internal.owner)
        if owner is not None:
            internals.check(internal, owner)


def _is_path(owner: str) -> bool:
    return owner.startswith("deepspeed.")


def _owner(engine: Any, owner: str) -> Any:
    """Return the object that ``Internal.owner`` names; ``None`` where this engine has none."""
    if owner == "engine":
        return engine
    if owner == "engine config":
        return engine._config
    if owner == "zero config":
        return engine._config.zero_config
    if owner == "module":
        return engine.module
    if owner == "checkpoint engine":
        return engine.checkpoint_engine
    if owner == "parameter":
        return next(engine.module.parameters(), None)
    if owner == "optimizer":
        return engine.optimizer
    offload = engine.optimizer.parameter_offload
    return offload if owner == "offload" else offload.get_param_coordinator()


def changed(feature: str, found: str) -> ContractError:
    """Return the error that says what ``feature`` found instead of the DeepSpeed internal that it uses."""
    return internals.changed(feature, found, "deepspeed")


def _check_needed(engine: Any) -> None:
    """Check what this configuration asks for and not every release has."""
    if engine.is_deepcompile_enabled():
        need(COMPILE_BACKEND, "set 'compile.deepcompile' to false")
    if getattr(engine.optimizer, "swap_optimizer", False):
        need(STEPPED_OFFLOADED, "offload the optimizer to the CPU")


def _check_supported(engine: Any) -> None:
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.engine import PipelineModule

    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(f"attach() takes the engine that deepspeed.initialize() returned, got {type(engine).__name__}.")
    require(CONFIGURATION, engine)
    stage = int(engine.zero_optimization_stage())
    if stage not in (1, 2, 3):
        raise ValueError(f"ZeroSync needs ZeRO stage 1, 2 or 3, found 'zero_optimization.stage' = {stage}.")
    if isinstance(engine.module, PipelineModule):
        raise ValueError("ZeroSync does not support DeepSpeed pipeline parallelism; use a plain module.")
    if isinstance(engine.optimizer, BF16_Optimizer):
        raise ValueError(
            "ZeroSync does not support DeepSpeed's BF16_Optimizer, which ZeRO stage 1 with bf16 parameters and"
            " 'data_types.grad_accum_dtype' = 'fp32' selects. Use stage 2, or leave grad_accum_dtype out."
        )
    if getattr(engine, "zenflow", False):
        raise ValueError(
            "ZeroSync does not support ZenFlow; remove 'zero_optimization.zenflow' from the configuration."
        )
    if type(engine.optimizer).__name__ == "MiCS_Optimizer":
        raise ValueError("ZeroSync does not support MiCS; remove 'zero_optimization.mics_shard_size'.")
    if getattr(engine, "zero_quantized_gradients", bool)():
        raise ValueError("ZeroSync does not support quantized gradients; set 'zero_quantized_gradients' to false.")
    if any(getattr(param, "use_muon", False) for param in engine.module.parameters()):
        raise ValueError("ZeroSync does not support Muon, which needs whole gradients. Use AdamW or SGD.")
    if getattr(getattr(engine, "_autoep_folding_spec", None), "tp_size", 1) > 1:
        raise ValueError("ZeroSync does not support AutoEP folded with tensor parallelism. Use one of the two.")
    if not isinstance(engine.optimizer, ZeROOptimizer):
        raise ValueError(
            f"ZeroSync needs an engine with an optimizer, found {type(engine.optimizer).__name__}. Pass one to"
            " deepspeed.initialize(), or name one in the DeepSpeed configuration."
        )
