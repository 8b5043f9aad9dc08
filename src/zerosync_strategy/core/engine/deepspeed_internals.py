"""The internals of DeepSpeed that ZeroSync uses (rule C1): for every training, and for single features."""

from __future__ import annotations

from zerosync_strategy.core.engine.contract import Internal, rows

GRADIENT_SHARDS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"

_ENGINE = "deepspeed.runtime.engine"
_STAGE12 = "deepspeed.runtime.zero.stage_1_and_2"
_STAGE3 = "deepspeed.runtime.zero.stage3"
_PARTITION = "deepspeed.runtime.zero.partition_parameters"
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload"
_LINEAR = "deepspeed.runtime.zero.linear"

# Not in every supported release in the form needed. Code asks has() if it has another way, else need().
CLEAR_BACKWARD = Internal("window", "optimizer", "clear_backward_seen_flag", (), since="0.18.5")
SEQUENTIAL_GATHERS = Internal("gathers", "zero config", "allgather_sequential", public=True, since="0.18.5")
COMPILE_BACKEND = Internal("DeepCompile", "engine", "get_deepcompile_backend", since="0.18.9")
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
COMPUTES_NORM = Internal("gradient clipping", "optimizer", "compute_grad_norm", named_in=_STAGE12, since="0.19.8")

CONFIGURATION = (
    *rows("configuration", "engine", "_config"),
    *rows("configuration", "engine config", "_param_dict"),
)  # fmt: skip
ALL_STAGES = (
    *rows("window, reduction and checkpoints", "engine", """
        +backward(loss) +step +zero_grad() allreduce_gradients _backward_prologue() +is_gradient_accumulation_boundary()
        +no_sync() +destroy() +get_global_grad_norm() is_deepcompile_active()
        +save_checkpoint(save_dir, tag, client_state)
        +load_checkpoint(load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states,
                         load_module_only)
        +global_rank +global_steps +mp_world_size +checkpoint_engine load_universal_checkpoint()
        +load_module_state_dict(checkpoint, strict)
        _copy_recovery_script(save_path) _get_ckpt_name(checkpoints_path, tag)
        _get_zero_ckpt_name(checkpoints_path, tag)
    """),
    *rows("window", "engine", "+coalesce_grad_reduction()", since="0.19.1"),
    *rows("window and reduction", "optimizer", """
        +step +optimizer +zero_grad(set_to_none) _backward_active_depth _grad_acc_hooks torch_autocast_gradscaler
        has_overflow(partition_gradients) averaged_gradients +dtype dp_process_group gradient_accumulation_dtype
        +communication_data_type +gradient_predivide_factor +reduce_bucket_size clip_grad +loss_scale
    """),
    *rows("window", "optimizer", "+add_param_group", optional=True),
    *rows("window", "optimizer", "run_grad_acc_post_hooks()", until="0.18.5"),
    *rows("window", "optimizer", "finalize_gradient_accumulation_boundary()", since="0.19.4"),
    *rows("window", "engine config", "timers_config"),
    *rows("window", "zero config", "+ignore_unused_parameters"),
    *rows("checkpoints", "deepspeed.runtime.checkpoint_engine", "TorchCheckpointEngine"),
    *rows("checkpoints", "checkpoint engine", "+save(state_dict, path)"),
    *rows("checkpoints", "engine", "+global_samples +micro_steps +skipped_steps +lr_scheduler"),
    *rows("checkpoints", "optimizer", "loss_scaler dynamic_loss_scale overflow"),
    *rows("access to shards", "deepspeed.utils.tensor_fragment", "+safe_get_full_grad(param)"),
    *rows("collectives and their report", "deepspeed.comm.comm", "cdb comms_logger"),
    *rows("collectives", "deepspeed.comm.torch", "+TorchBackend"),
    *rows("collectives", "comm backend", "all_gather_function reduce_scatter_function", optional=True),
    CLEAR_BACKWARD, MARKED_GRADIENT, COMPUTES_NORM, COMPILE_BACKEND, ASYNC_MESSAGES,
)  # fmt: skip
ACCUMULATION = rows("gradient accumulation", "engine config", "+train_batch_size +gradient_accumulation_steps")
STAGE_1_2 = (
    *rows("reduction and step", "optimizer", """
        bit16_groups bit16_groups_flat partition_size real_dp_process_group cpu_offload
        scaled_global_norm() has_moe_layers _average_expert_grad_norms(norm_groups) model_parallel_rank
        _model_parallel_all_reduce(tensor, op)
        parallel_partitioned_bit16_groups single_partition_of_fp32_groups
        _update_model_bit16_weights(group_index) get_param_id(param)
        +state_dict() +load_state_dict refresh_fp32_params() _link_all_hp_params()
        _optimizer_step(group_no) _lazy_init_hp_params_optimizer_state() _restore_from_bit16_weights()
        update_lp_params()
    """),
    *rows("reduction and step", "optimizer", "_hp_optimizer_states_linked param_buffer_of_bit16_for_cpu_offload_groups",
          named_in=_STAGE12),
    *rows("access to shards", "parameter", "get_full_hp_param get_full_hp_grad set_full_hp_grad set_full_hp_param",
          named_in="deepspeed.utils.mixed_precision_linkage"),
    *rows("parameter gather", _STAGE12, """
        all_gather_dp_groups(groups_flat, partitioned_param_groups, dp_process_group)
    """),
    *rows("whole parameters", "parameter", "_hp_mapping", named_in=_STAGE12),
    AVERAGES,
)  # fmt: skip
STAGE_3 = (
    *rows("reduction and step", "optimizer", f"""
        ipg_buckets fp16_groups offload_optimizer {GRADIENT_SHARDS} _leaf_module_hooks
        _get_norm_groups() model_parallel_group unscale_and_clip_grads(sub_group_id, total_norm)
        fp16_partitioned_groups_flat fp32_partitioned_groups_flat refresh_fp32_params()
        parameter_offload _partition_all_parameters()
        _prepare_sub_group(sub_group_id, timer_names) _optimizer_step(sub_group_id)
        _reassign_or_swap_out_partitioned_parameters(sub_group_id) sub_group_to_group_id
        _set_fp32_optimizer_param_groups() _clear_fp32_optimizer_param_groups() +state_dict() +load_state_dict
    """),
    *rows("reduction and step", "optimizer", "swap_optimizer backup_optimizer", named_in=_STAGE3),
    *rows("reduction with an offloaded optimizer", "optimizer", "get_param_id grad_position norm_for_param_grads",
          named_in=_STAGE3, until="0.19.5"),
    *rows("access to shards", "optimizer", """
        get_local_fp32_param(param) get_fp32_grad_for_param(param) set_fp32_grad_for_param(value, param)
        get_local_fp32_grad_for_param(param) set_local_grad_for_param(value, param)
        update_fp32_grad_for_param_vectorized(update_func, param_list) get_full_hp_param(param, optim_state_key)
        set_full_hp_param(value, param, optim_state_key) set_local_hp_param(value, param, optim_state_key)
    """),
    *rows("access to shards", "parameter", "_z3_optimizer", named_in=_STAGE3),
    *rows("full parameters", "engine", "_zero3_consolidated_16bit_state_dict"),
    *rows("gathers and units", "zero config", """
        +overlap_comm +use_all_reduce_for_fetch_params +zero_quantized_weights +prefetch_bucket_size
        +max_live_parameters +max_reuse_distance
    """),
    *rows("gathers", "parameter", """
        ds_id ds_numel ds_tensor ds_status ds_process_group ds_shape ds_persist ds_active_sub_modules
        +all_gather_coalesced(params) +partition(param_list, hierarchy, has_been_updated)
    """),
    *rows("gathers and shard_over()", "parameter", "ds_quant_scale ds_zero_param_process_group", named_in=_PARTITION),
    *rows("gathers", _PARTITION, """
        get_allgather_dtype(param, param_ds_tensor) +GatheredParameters(params)
        _dist_allgather_fn(input_tensor, output_tensor, group)
    """),
    *rows("gathers", f"{_PARTITION}.GatheredParameters", "+enabled +params +src_rank", named_in=_PARTITION),
    *rows("units", "engine", """
        module_forward_pre_hook module_forward_post_hook _forward_prologue(inputs, kwargs) _forward_epilogue()
        zero_optimization_partition_weights()
    """),
    *rows("units", "offload", """
        forward_hooks _remove_module_hooks() setup_zero_stage3_hooks()
        _register_deepspeed_module(module)
    """),
    *rows("units", "module", "pre_bwd_fn post_bwd_fn", named_in=_OFFLOAD),
    *rows("units", "module", "ds_external_parameters", named_in=_PARTITION),
    *rows("units", _OFFLOAD, "FWD_MODULE_STACK"),
    *rows("units", _LINEAR, "zero3_linear_wrap"),
    *rows("units", "deepspeed.utils", "+z3_leaf_module(model)"),
    *rows("shard_over", "parameter", "ds_zero_partition_process_group", named_in=_PARTITION, since="0.19.3"),
    *rows("shard_over", "parameter", "ds_optim_param", named_in=_ENGINE),
    STEPPED_OFFLOADED, PARAM_GROUP, AVERAGED_RANKS, SEQUENTIAL_GATHERS, WHOLE_GATHER,
)  # fmt: skip
UNSHARD_ON_READ = (
    *rows("unsharding on read", "engine", "param_names"),
    *rows("unsharding on read", _OFFLOAD, "ZeROOrderedDict"),
)
SEVERAL_ENGINES = (
    *rows("several engines over one module", "optimizer", "+module persistent_parameters"),
    *rows("several engines over one module", "offload", "+module persistent_parameters"),
    *rows("several engines over one module", _PARTITION, "_init_external_params"),
)  # fmt: skip
NESTED_ZERO_INIT = (
    *rows("zero.Init inside another one", _PARTITION, "top_level_context"),
    *rows("zero.Init inside another one", f"{_PARTITION}.Init", "ds_process_group +enabled", named_in=_PARTITION),
)  # fmt: skip
ANY_MODEL = (
    *rows("parameters without dimensions", f"{_ENGINE}.DeepSpeedEngine", "_broadcast_model()"),
    *rows("parameters in any memory layout", f"{_ENGINE}.DeepSpeedEngine", "_configure_distributed_model(model)"),
    *rows("parameters without dimensions", f"{_PARTITION}.Init", "_zero_init_param(param)"),
)
EVALUATION = rows("evaluation", "offload", "_restore_from_bit16_weights", named_in=_ENGINE)
DEEPCOMPILE = (
    *rows("DeepCompile", "deepspeed.compile.util", "pre_backward_hooks"),
    *rows("DeepCompile", "deepspeed.compile.backend", "remaining_schedule"),
)
# The mark of a configuration that ZeroSync refuses; an engine that lacks it is not so configured.
REFUSED = rows("window", "engine", "_autoep_folding_spec", optional=True)
EVERY_TABLE = (
    CONFIGURATION, ALL_STAGES, ACCUMULATION, STAGE_1_2, STAGE_3, UNSHARD_ON_READ,
    SEVERAL_ENGINES, NESTED_ZERO_INIT, ANY_MODEL, EVALUATION, DEEPCOMPILE, REFUSED,
)  # fmt: skip
