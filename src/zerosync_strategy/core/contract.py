"""Every DeepSpeed internal that the core relies on, verified on the live engine (rule C1).

DeepSpeed's internals move. What this file lists is what the rest of the core may touch; ``verify`` runs at attach and
turns a missing or changed internal into an error with a name, before any training.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

TESTED_DEEPSPEED = ("0.19.8",)


class ContractError(RuntimeError):
    """The live DeepSpeed engine lacks an internal that a ZeroSync feature needs."""


@dataclass(frozen=True)
class Internal:
    """An attribute of ``owner`` that ``feature`` relies on; ``parameters`` is set for methods that we call or extend.

    The names in ``parameters`` must lead the method's own parameters, so that a call by position keeps its meaning.
    """

    feature: str
    owner: str
    name: str
    parameters: tuple[str, ...] | None = None


_ENGINE = (
    Internal("window", "engine", "backward", ("loss",)),
    Internal("window", "engine", "step"),
    Internal("window", "engine", "zero_grad", ()),
    Internal("window", "engine", "allreduce_gradients"),
    Internal("window", "engine", "_backward_prologue", ()),
    Internal("window", "engine", "_take_model_step", ("lr_kwargs",)),
    Internal("window", "engine", "is_gradient_accumulation_boundary", ()),
    Internal("window", "engine", "no_sync", ()),
    Internal("window", "engine", "destroy", ()),
    Internal("DeepCompile", "engine", "get_deepcompile_backend"),
    Internal("DeepCompile", "engine", "is_deepcompile_active", ()),
    Internal("checkpoint in mid-window", "engine", "save_checkpoint"),
    Internal("checkpoint in mid-window", "engine", "load_checkpoint"),
    Internal("checkpoint in mid-window", "engine", "global_rank"),
)
_OPTIMIZER = (
    Internal("window", "optimizer", "step"),
    Internal("window", "optimizer", "zero_grad", ("set_to_none",)),
    Internal("window", "optimizer", "finalize_gradient_accumulation_boundary", ()),
    Internal("window", "optimizer", "_backward_active_depth"),
    Internal("window", "optimizer", "clear_backward_seen_flag", ()),
    Internal("reduction", "optimizer", "averaged_gradients"),
    Internal("reduction", "optimizer", "dtype"),
    Internal("reduction", "optimizer", "gradient_accumulation_dtype"),
    Internal("reduction", "optimizer", "communication_data_type"),
    Internal("reduction", "optimizer", "gradient_predivide_factor"),
    Internal("gradient clipping", "optimizer", "clip_grad"),
    Internal("gradient norm", "optimizer", "loss_scale"),
)
_STAGE_1_AND_2 = (
    Internal("window", "optimizer", "process_gradients", ("param", "i")),
    Internal("reduction", "optimizer", "bit16_groups"),
    Internal("reduction", "optimizer", "bit16_groups_flat"),
    Internal("reduction", "optimizer", "partition_size"),
    Internal("reduction", "optimizer", "real_dp_process_group"),
    Internal("reduction", "optimizer", "dp_process_group"),
    Internal("reduction", "optimizer", "sequence_parallel_size"),
    Internal("reduction", "optimizer", "gradient_average"),
    Internal("reduction", "optimizer", "_build_compact_grad_partition_buffer", ("group_idx",)),
    Internal("reduction", "optimizer", "cpu_offload"),
    Internal("gradient norm", "optimizer", "scaled_global_norm", ()),
)
_STAGE_1_AND_2_OFFLOAD = (
    Internal("reduction with an offloaded optimizer", "optimizer", "params_in_partition"),
    Internal("reduction with an offloaded optimizer", "optimizer", "single_partition_of_fp32_groups"),
    Internal("reduction with an offloaded optimizer", "optimizer", "get_param_id", ("param",)),
    Internal("reduction with an offloaded optimizer", "optimizer", "grad_position"),
    Internal("reduction with an offloaded optimizer", "optimizer", "norm_for_param_grads"),
    Internal("reduction with an offloaded optimizer", "optimizer", "update_offload_overflow_tracker", ("grad",)),
)
_STAGE_3_GRADIENTS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
_STAGE_3_RELEASES = "_PartitionedParameterCoordinator__params_to_release"
_STAGE_3_ALL_GATHER = "_PartitionedParameterCoordinator__all_gather_params"
_STAGE_3_GATHER_STREAM = "_PartitionedParameterCoordinator__allgather_stream"
_STAGE_3_IN_FLIGHT = "_PartitionedParameterCoordinator__inflight_param_registry"
_OFFLOAD_GATHER_STREAM = "_DeepSpeedZeRoOffload__allgather_stream"
_STAGE_3 = (
    Internal("held parameters", "optimizer", "parameter_offload"),
    Internal("window", "optimizer", "reduce_ready_partitions_and_remove_grads", ("param",)),
    Internal("reduction", "optimizer", "fp16_groups"),
    Internal("reduction", "optimizer", "offload_optimizer"),
    Internal("reduction", "optimizer", "_offload_boundary_param_ids"),
    Internal("reduction", "optimizer", "_get_param_partition_group", ("param",)),
    Internal("reduction", "optimizer", "_gradient_averaging_world_size", ("params", "partition_world_size")),
    Internal("reduction", "optimizer", _STAGE_3_GRADIENTS),
    Internal("gradient norm", "optimizer", "_get_norm_groups", ()),
    Internal("full parameters", "optimizer", "refresh_fp32_params", ()),
    Internal("full parameters", "engine", "_zero3_consolidated_16bit_state_dict"),
)


_EAGER_FRAMES = (
    Internal("eager frames", "engine", "forward"),
    Internal("eager frames", "engine", "param_names"),
    Internal("eager frames", "engine", "module_forward_pre_hook"),
    Internal("eager frames", "engine", "module_forward_post_hook"),
    Internal("eager frames", "engine", "_create_module_forward_pre_hook", ()),
    Internal("eager frames", "engine", "_create_module_forward_post_hook", ()),
    Internal("eager frames", "offload", "forward_hooks"),
    Internal("eager frames", "offload", "backward_hooks"),
    Internal("eager frames", "offload", "fwd_pre_hook"),
    Internal("eager frames", "offload", "_remove_module_hooks", ()),
    Internal("eager frames", "offload", "setup_zero_stage3_hooks", ()),
    Internal("eager frames", "coordinator", "is_invalid_trace", ()),
    Internal("eager frames", "parameter", "all_gather_coalesced", ("params",)),
)


def internals(engine: Any) -> tuple[Internal, ...]:
    """What the core relies on for this engine's stage and configuration."""
    if engine.zero_optimization_stage() == 3:
        return (*_ENGINE, *_OPTIMIZER, *_STAGE_3)
    offload = _STAGE_1_AND_2_OFFLOAD if getattr(engine.optimizer, "cpu_offload", False) else ()
    return (*_ENGINE, *_OPTIMIZER, *_STAGE_1_AND_2, *offload)


def verify(engine: Any) -> None:
    """Check that ``engine`` is one that ZeroSync supports and has every internal that it relies on.

    Raises:
        TypeError: ``engine`` is not a ``DeepSpeedEngine``.
        ValueError: the engine is configured in a way that ZeroSync does not support.
        ContractError: an internal is missing or has changed.
    """
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.engine import PipelineModule

    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(f"attach() takes the engine that deepspeed.initialize() returned, got {type(engine).__name__}.")
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
    if engine.zero_quantized_gradients():
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

    owners = {"engine": engine, "optimizer": engine.optimizer}
    for internal in internals(engine):
        found = problem(owners[internal.owner], internal)
        if found:
            raise changed(internal.feature, f"{type(owners[internal.owner]).__name__}.{internal.name} {found}")
    if engine.is_deepcompile_active():
        raise ValueError(
            "attach() found an engine that DeepCompile has compiled already, and its graphs reduce gradients by"
            " themselves. Call engine.compile() after attach()."
        )
    if stage != 3:
        from deepspeed.runtime.zero import stage_1_and_2

        gather = getattr(stage_1_and_2, "all_gather_dp_groups", None)
        takes = {"partitioned_param_groups", "dp_process_group"}
        if gather is None or not takes <= inspect.signature(gather).parameters.keys():
            raise changed("parameter gather", "stage_1_and_2.all_gather_dp_groups is missing or takes other arguments")
    if not hasattr(torch._C, "_current_graph_task_id"):
        raise changed("window", f"torch._C._current_graph_task_id is missing in torch {torch.__version__}")


def engine_config(engine: Any) -> dict[str, Any]:
    """The DeepSpeed configuration of ``engine`` as the user gave it, unknown blocks included.

    Raises:
        ContractError: DeepSpeed no longer keeps it.
    """
    found = getattr(engine._config, "_param_dict", None)
    if not isinstance(found, dict):
        raise changed("configuration block", "DeepSpeedConfig._param_dict is missing")
    return found


def accumulate_outside(engine: Any) -> None:
    """Let every ``step()`` of ``engine`` be an optimizer step, and its losses be as they are given.

    What DeepSpeed's ``set_train_batch_size`` does, which does not know the ranks under sequence parallelism.

    Raises:
        ContractError: DeepSpeed keeps the numbers elsewhere.
    """
    config = engine._config
    if not (hasattr(config, "train_batch_size") and hasattr(config, "gradient_accumulation_steps")):
        raise changed("gradient accumulation", "DeepSpeedConfig lacks train_batch_size or gradient_accumulation_steps")
    config.train_batch_size //= config.gradient_accumulation_steps
    config.gradient_accumulation_steps = 1


def backend() -> Any:
    """DeepSpeed's process-wide communication backend, through which all its collectives go.

    Raises:
        ContractError: there is none.
    """
    from deepspeed.comm import comm

    found = getattr(comm, "cdb", None)
    if found is None:
        raise changed("report", "deepspeed.comm.comm.cdb is missing")
    return found


def changed(feature: str, found: str) -> ContractError:
    """The error that says what ``feature`` found instead of the DeepSpeed internal that it relies on."""
    import deepspeed

    return ContractError(
        f"ZeroSync's {feature} relies on a DeepSpeed internal that has changed: {found}. Found DeepSpeed"
        f" {deepspeed.__version__}; tested with {', '.join(TESTED_DEEPSPEED)}. Install a tested version, or train"
        " without ZeroSync."
    )


def stage_3_restrict(optimizer: Any, first: Any, part: torch.nn.Module) -> None:
    """Let a ZeRO-3 ``optimizer`` release, and gather again after its step, the parameters of ``part`` alone.

    Args:
        first: the ZeRO-3 optimizer whose hooks run in the module that is trained; may be ``optimizer`` itself.

    Raises:
        ContractError: DeepSpeed keeps what gathers and releases elsewhere.
    """
    from deepspeed.runtime.zero import partition_parameters

    own, gathers, params = optimizer.parameter_offload, first.parameter_offload, set(part.parameters())
    for owner, names in (
        (optimizer, ("module", "persistent_parameters")),
        (own, ("module", "persistent_parameters", "param_coordinator", _OFFLOAD_GATHER_STREAM)),
    ):
        for name in names:
            if name not in vars(owner):
                raise changed("several engines over one module", f"{type(owner).__name__}.{name} is missing")
    if not hasattr(partition_parameters, "_init_external_params"):
        raise changed("several engines over one module", "partition_parameters._init_external_params is missing")
    for module in part.modules():
        partition_parameters._init_external_params(module)  # what an engine's own module has been given
    own.module = optimizer.module = part
    persistent = [param for param in optimizer.persistent_parameters if param in params]
    own.persistent_parameters = optimizer.persistent_parameters = persistent
    own.param_coordinator = gathers.param_coordinator
    setattr(own, _OFFLOAD_GATHER_STREAM, getattr(gathers, _OFFLOAD_GATHER_STREAM))


def stage_3_coordinator(optimizer: Any) -> Any:
    """What gathers and releases the parameters of a ZeRO-3 optimizer.

    Raises:
        ContractError: it lacks a method that holding parameters relies on.
    """
    from deepspeed.runtime.zero import partition_parameters

    coordinator = optimizer.parameter_offload.get_param_coordinator()
    for internal in (
        Internal("held parameters", "coordinator", "fetch_sub_module", ("current_submodule", "forward")),
        Internal("held parameters", "coordinator", "release_sub_module", ("submodule", "forward")),
        Internal("held parameters", "coordinator", "release_backward_leftovers", ()),
        Internal("held parameters", "coordinator", "_invalidate_trace", ()),
        Internal("held parameters", "coordinator", _STAGE_3_RELEASES),
        Internal("gathers", "coordinator", _STAGE_3_ALL_GATHER, ("params", "forward")),
        Internal("gathers", "coordinator", _STAGE_3_GATHER_STREAM),
        Internal("gathers", "coordinator", _STAGE_3_IN_FLIGHT),
    ):
        found = problem(coordinator, internal)
        if found:
            raise changed(internal.feature, f"{type(coordinator).__name__}.{internal.name} {found}")
    all_gather = Internal("gathers", "module", "_dist_allgather_fn", ("input_tensor", "output_tensor", "group"))
    if found := problem(partition_parameters, all_gather):
        raise changed(all_gather.feature, f"partition_parameters.{all_gather.name} {found}")
    return coordinator


def stage_3_gather_stream(coordinator: Any) -> Any:
    """The stream on which ZeRO-3 gathers parameters and waits for them; ``None`` on a device without streams."""
    return getattr(coordinator, _STAGE_3_GATHER_STREAM)


@contextmanager
def stage_3_gathering_on(coordinator: Any, stream: Any) -> Iterator[None]:
    """While active, ZeRO-3 gathers parameters and waits for them on ``stream``."""
    before = getattr(coordinator, _STAGE_3_GATHER_STREAM)
    setattr(coordinator, _STAGE_3_GATHER_STREAM, stream)
    try:
        yield
    finally:
        setattr(coordinator, _STAGE_3_GATHER_STREAM, before)


@contextmanager
def stage_3_gathering_by(all_gather: Callable[..., Any]) -> Iterator[None]:
    """While active, what ZeRO-3 gathers to use it comes by ``all_gather(source, target, process_group)``.

    That is called with this rank's part and the place for all parts, both flat, and returns what can be waited for.
    """
    from deepspeed.runtime.zero import partition_parameters

    stock = partition_parameters._dist_allgather_fn
    partition_parameters._dist_allgather_fn = all_gather
    try:
        yield
    finally:
        partition_parameters._dist_allgather_fn = stock


def stage_3_gathers_by_all_reduce(engine: Any) -> bool:
    """Whether ZeRO-3 gathers parameters by reducing zeros and a part of each rank.

    Raises:
        ContractError: DeepSpeed keeps the option elsewhere.
    """
    option = getattr(engine._config.zero_config, "use_all_reduce_for_fetch_params", None)
    if option is None:
        raise changed("gathers", "DeepSpeedZeroConfig.use_all_reduce_for_fetch_params is missing")
    return bool(option)


def stage_3_in_flight(coordinator: Any) -> dict[Any, Any]:
    """ZeRO-3's handles of the gathers that nobody has waited for yet, by parameter."""
    return getattr(coordinator, _STAGE_3_IN_FLIGHT).data  # past the checks of its __setitem__


def outermost_zero_init() -> Any:
    """The ``zero.Init`` that converts what is built now; ``None`` outside of any.

    Raises:
        ContractError: DeepSpeed keeps it elsewhere.
    """
    from deepspeed.runtime.zero import partition_parameters

    if not hasattr(partition_parameters, "top_level_context"):
        raise changed("zero.Init inside another one", "partition_parameters.top_level_context is missing")
    return partition_parameters.top_level_context


def partition_over(param: Any, process_group: Any) -> None:
    """Let ZeRO-3 partition ``param``, still whole, over ``process_group``, with the values of its first rank."""
    param.ds_zero_partition_process_group = process_group
    # Or the engine would give all ranks the values of rank 0 first. DeepSpeed's mark of weights that differ by rank.
    param.ds_optim_param = True


def partition_is_asked_for(param: Any) -> bool:
    """Whether somebody, :func:`partition_over` or DeepSpeed, has chosen the process group of this one parameter."""
    return hasattr(param, "ds_zero_partition_process_group")


def partition_is_copied(param: Any) -> bool:
    """Whether ZeRO-3 keeps ``param`` a second time, partitioned over the ranks of a node (hpZ)."""
    return getattr(param, "ds_zero_param_process_group", None) is not None


def renew_streams(engine: Any) -> None:
    """Give the ZeRO optimizer of ``engine`` the streams that it would have if it were built now.

    Raises:
        ContractError: it keeps them elsewhere.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator, optimizer = get_accelerator(), engine.optimizer
    owners = [(optimizer, "reduction_stream")]
    if engine.zero_optimization_stage() == 3:
        offload = optimizer.parameter_offload
        owners = [
            (optimizer, "reduce_and_partition_stream"),
            (offload, _OFFLOAD_GATHER_STREAM),
            (offload.get_param_coordinator(), _STAGE_3_GATHER_STREAM),
        ]
    stream = None
    if not accelerator.is_synchronized_device():
        stream = accelerator.Stream() if engine.zero_overlap_comm() else accelerator.default_stream()
    for owner, name in owners:
        if not hasattr(owner, name):
            raise changed("race check", f"{type(owner).__name__}.{name} is missing")
        setattr(owner, name, stream)


def stage_3_release_cache(coordinator: Any) -> Any:
    """The ``lru_cache`` of what ZeRO-3 releases after which module, below DeepSpeed's decorators.

    Raises:
        ContractError: it is not there.
    """
    function = getattr(type(coordinator), _STAGE_3_RELEASES)
    while not hasattr(function, "cache_clear"):
        inner = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        function = next((found for found in inner if callable(found)), None)
        if function is None:
            raise changed("held parameters", f"{_STAGE_3_RELEASES} is not cached")
    return function


def stage_3_parameters_of(module: Any) -> list[Any]:
    """The parameters that ZeRO-3 gathers for ``module``: its own, and those below it if it is a leaf to ZeRO-3."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params, z3_leaf_module

    return list(iter_params(module, recurse=z3_leaf_module(module)))


def stage_3_modules_of(module: Any) -> Iterable[Any]:
    """The modules whose own parameters those are."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import z3_leaf_module

    return module.modules() if z3_leaf_module(module) else (module,)


@contextmanager
def stage_1_and_2_parameter_gather(gather: Callable[..., None]) -> Iterator[None]:
    """While active, ZeRO-1/2's step gives the updated parameters to all ranks by ``gather``.

    It is called with DeepSpeed's keywords, of which ``partitioned_param_groups`` (by group, one part per rank) and
    ``dp_process_group`` (by group) say everything.
    """
    from deepspeed.runtime.zero import stage_1_and_2

    stock = stage_1_and_2.all_gather_dp_groups
    stage_1_and_2.all_gather_dp_groups = gather
    try:
        yield
    finally:
        stage_1_and_2.all_gather_dp_groups = stock


def stage_3_gradient_partitions(optimizer: Any) -> dict[int, torch.Tensor]:
    """Stage 3's partition of each gradient, flat, by the ``ds_id`` of the parameter."""
    return getattr(optimizer, _STAGE_3_GRADIENTS)


def _found(owner: Any, name: str) -> bool:
    return hasattr(type(owner), name) or name in vars(owner)  # and no property is computed


def problem(owner: Any, internal: Internal) -> str | None:
    """What is wrong with ``internal`` on ``owner``, or ``None``."""
    if not _found(owner, internal.name):
        return "is missing"
    if internal.parameters is None:
        return None
    parameters = tuple(inspect.signature(getattr(owner, internal.name)).parameters)
    if parameters == ("args", "kwargs"):  # behind one of DeepSpeed's decorators, which hide the names
        return None
    if parameters[: len(internal.parameters)] != internal.parameters:
        return f"takes {parameters}, expected {internal.parameters}"
    return None


def verify_eager_frames(engine: Any) -> None:
    """Check what reading partitioned parameters relies on.

    Raises:
        ContractError: an internal is missing or has changed.
    """
    from deepspeed.runtime.zero import linear, parameter_offload

    offload = engine.optimizer.parameter_offload
    coordinator = stage_3_coordinator(engine.optimizer)
    parameter = next(engine.module.parameters())
    owners = {"engine": engine, "offload": offload, "coordinator": coordinator, "parameter": parameter}
    for internal in _EAGER_FRAMES:
        found = problem(owners[internal.owner], internal)
        if found:
            raise changed(internal.feature, f"{type(owners[internal.owner]).__name__}.{internal.name} {found}")
    for name in ("ZeROOrderedDict", "FWD_MODULE_STACK", "ensure_zero_ordered_dict"):
        if not hasattr(parameter_offload, name):
            raise changed("eager frames", f"parameter_offload.{name} is missing")
    for name in ("LinearFunctionForZeroStage3", "zero3_linear_wrap"):
        if not hasattr(linear, name):
            raise changed("eager frames", f"linear.{name} is missing")


def is_gathered(param: Any) -> bool:
    """Whether ``param`` has its values: it is not one of ZeRO-3, or gathered, and not still on its way."""
    status = getattr(param, "ds_status", None)
    return status is None or status.name == "AVAILABLE"


def stage_3_bytes(param: Any) -> int:
    """Bytes of a ZeRO-3 parameter in full."""
    return int(param.ds_numel) * param.element_size()


def is_claimed(param: Any) -> bool:
    """Whether ``param`` has its values, and for who reads it now also in the backward.

    So it is with a module's own parameters while its forward or backward runs, and with persistent ones. Others may be
    there by chance, prefetched or not yet released, and gone by then.
    """
    return is_gathered(param) and (not hasattr(param, "ds_id") or param.ds_persist or bool(param.ds_active_sub_modules))


def stage_3_gather(param: Any) -> torch.Tensor:
    """The values of a ZeRO-3 parameter that is partitioned, and stays so, in memory of their own. Collective."""
    param.all_gather_coalesced([param]).wait()
    full: torch.Tensor = param.data
    if full.data_ptr() == param.ds_tensor.data_ptr():  # a group of one rank gathers nothing
        full = full.clone()
    param.partition()
    return full


@functools.cache
def linear_is_for_graphs() -> None:
    """Let Dynamo take ZeRO-3's ``F.linear``, an autograd function, into its graphs as it is.

    What Dynamo makes of an autograd function instead, a class anew at each call, is in a cycle of references with what
    it saves when a graph runs eagerly: weights and inputs stay until Python collects garbage, one layer at a time.
    """
    from deepspeed.runtime.zero import linear
    from torch._dynamo.eval_frame import skip_code

    function = linear.LinearFunctionForZeroStage3
    torch.compiler.allow_in_graph(linear.zero3_linear_wrap)
    for called in (linear.zero3_linear_wrap, function.forward, function.setup_context, function.backward):
        skip_code(called.__code__)  # nor is it compiled by itself, called from a frame that is not


@functools.cache
def passive_parameters() -> type:
    """ZeRO-3's own dictionary of a module's parameters, but one that gathers nothing when it is read."""
    from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict

    attributes = {"__getitem__": OrderedDict.__getitem__, "__module__": ZeROOrderedDict.__module__}
    return type("ZeROOrderedDict", (ZeROOrderedDict,), attributes)


def unwrap_compiled(engine: Any) -> None:
    """Give ``engine`` the modules inside what ``torch.compile(module)`` made of them before ``deepspeed.initialize``.

    They stay compiled, as by ``module.compile()``. The wrapper hands attributes that are set on it to the module
    inside, so DeepSpeed 0.19.8 takes the two for one: it gives the module the wrapper's own empty dictionary of
    parameters, the wrapper none, and both one set of backward hooks. Without a wrapper nothing is changed.
    """
    from deepspeed.runtime.zero.parameter_offload import ensure_zero_ordered_dict

    def unwrap(module: Any) -> Any:
        while (inside := vars(module)["_modules"].get("_orig_mod")) is not None:
            inside._compiled_call_impl = module.dynamo_ctx(inside._call_impl)
            module = inside
        return module

    if all(unwrap(module) is module for module in engine.module.modules()):
        return
    optimizer, offload = engine.optimizer, engine.optimizer.parameter_offload
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    offload._remove_module_hooks()
    offload.forward_hooks.clear()
    offload.backward_hooks.clear()
    for parent in list(engine.module.modules()):
        for name, child in vars(parent)["_modules"].items():
            if child is not None:
                vars(parent)["_modules"][name] = unwrap(child)
    module = engine.module = optimizer.module = offload.module = unwrap(engine.module)
    for param, name in engine.param_names.items():
        engine.param_names[param] = name.replace("_orig_mod.", "")
        owner, _, name = engine.param_names[param].rpartition(".")
        module.get_submodule(owner)._parameters.setdefault(name, param)
    for submodule in module.modules():
        ensure_zero_ordered_dict(submodule)
        for closure in ("pre_bwd_fn", "post_bwd_fn"):
            vars(submodule).pop(closure, None)
    engine.module_forward_pre_hook = engine._create_module_forward_pre_hook()
    engine.module_forward_post_hook = engine._create_module_forward_post_hook()
    offload.setup_zero_stage3_hooks()


@dataclass(frozen=True)
class ModuleHook:
    """One hook around a module's forward.

    ``when`` is ``before`` and ``after`` for those that gather and release, ``backward`` for those that prepare the
    backward, and empty for the engine's own, around the whole model.
    """

    when: str
    stock: Callable[..., Any]
    replace: Callable[[Callable[..., Any]], None]


def stage_3_module_hooks(engine: Any) -> list[ModuleHook]:
    """The hooks that DeepSpeed has on the modules of a ZeRO-3 engine."""
    offload = engine.optimizer.parameter_offload
    before = {id(module._forward_pre_hooks) for module in engine.module.modules()}
    kinds = [(handle, "") for handle in (engine.module_forward_pre_hook, engine.module_forward_post_hook)]
    kinds += [(handle, "backward") for handle in (offload.fwd_pre_hook, *offload.backward_hooks)]
    for handle in offload.forward_hooks:
        kinds.append((handle, "before" if id(handle.hooks_dict_ref()) in before else "after"))
    return [
        ModuleHook(when, (hooks := handle.hooks_dict_ref())[handle.id], functools.partial(hooks.__setitem__, handle.id))
        for handle, when in kinds
    ]


def stage_3_modules_running() -> list[Any]:
    """ZeRO-3's own stack of the modules whose forward runs, below them those of the engines."""
    from deepspeed.runtime.zero import parameter_offload

    return parameter_offload.FWD_MODULE_STACK


def stage_3_forget_order(engine: Any) -> None:
    """Let ZeRO-3 record anew in which order modules run, and release what it has gathered ahead of time."""
    coordinator = stage_3_coordinator(engine.optimizer)
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()


def stage_3_release(engine: Any, keeps: Callable[[Any], bool]) -> None:
    """After an exception: partition what is gathered.

    But for persistent parameters, those that a user's context has gathered, and what ``keeps``.
    """
    stage_3_forget_order(engine)
    stage_3_coordinator(engine.optimizer).release_backward_leftovers()
    for module in engine.module.modules():
        if hasattr(module._parameters, "_in_forward"):
            module._parameters._in_forward = False
    for param in engine.module.parameters():
        if hasattr(param, "ds_status") and is_gathered(param):
            param.ds_active_sub_modules.clear()
            if not (param.ds_persist or keeps(param) or getattr(param, "_ds_z3_gathered_param_context_depth", 0)):
                param.partition()


@contextmanager
def stage_3_in_shape(param: Any) -> Iterator[None]:
    """While active, a parameter has its shape, partitioned or not: autograd wants it so when it is given a gradient."""
    if param.numel() > 0 or not hasattr(param, "ds_shape"):
        yield
        return
    data, param.data = param.data, param.data.new_empty(1).expand(param.ds_shape)
    try:
        yield
    finally:
        param.data = data


@contextmanager
def deepcompile_schedule(last: Callable[..., None]) -> Iterator[None]:
    """Around DeepCompile's preparation of an engine: ``last`` runs after its own passes, whenever they run.

    What it lets its own reductions find at the beginning of a backward is left out.

    Raises:
        ContractError: DeepCompile keeps its schedule or its hooks elsewhere.
    """
    from deepspeed.compile import backend, util

    before = len(util.pre_backward_hooks) if hasattr(util, "pre_backward_hooks") else None
    yield
    schedule = getattr(backend, "remaining_schedule", None)
    if before is None or schedule is None:
        raise changed("DeepCompile", "compile.util.pre_backward_hooks or compile.backend.remaining_schedule is missing")
    del util.pre_backward_hooks[before:]
    backend.remaining_schedule = type(schedule)((step, [*passes, last]) for step, passes in schedule)


def deepcompile_id(optimizer: Any, param: Any) -> int:
    """By which DeepCompile's graphs name a parameter."""
    return int(param.ds_id if hasattr(param, "ds_id") else optimizer.get_param_id(param))
