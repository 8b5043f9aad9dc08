"""Every DeepSpeed internal that the core relies on, verified on the live engine (rule C1).

DeepSpeed's internals move. What this file lists is what the rest of the core may touch; ``verify`` runs at attach and
turns a missing or changed internal into an error with a name, before any training.
"""

from __future__ import annotations

import inspect
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
    Internal("window", "engine", "_backward_epilogue", ()),
    Internal("window", "engine", "_take_model_step", ("lr_kwargs",)),
    Internal("window", "engine", "is_gradient_accumulation_boundary", ()),
    Internal("window", "engine", "no_sync", ()),
    Internal("window", "engine", "destroy", ()),
    Internal("checkpoint in mid-window", "engine", "save_checkpoint"),
    Internal("checkpoint in mid-window", "engine", "load_checkpoint"),
    Internal("checkpoint in mid-window", "engine", "global_rank"),
)
_OPTIMIZER = (
    Internal("window", "optimizer", "zero_grad", ("set_to_none",)),
    Internal("window", "optimizer", "overlapping_partition_gradients_reduce_epilogue", ()),
    Internal("window", "optimizer", "finalize_gradient_accumulation_boundary", ()),
    Internal("window", "optimizer", "set_gradient_accumulation_boundary", ("is_boundary",)),
    Internal("window", "optimizer", "averaged_gradients"),
    Internal("window", "optimizer", "micro_step_id"),
    Internal("window", "optimizer", "_epilogue_ran_this_backward"),
    Internal("window", "optimizer", "_backward_active_depth"),
    Internal("window", "optimizer", "clear_backward_seen_flag", ()),
    Internal("window", "optimizer", "step"),
    Internal("abort", "optimizer", "ipg_buckets"),
    Internal("abort", "optimizer", "params_already_reduced"),
    Internal("gradient clipping", "optimizer", "clip_grad"),
)
_STAGE_1_AND_2 = (
    Internal("window", "optimizer", "bit16_groups"),
    Internal("window", "optimizer", "process_gradients", ("param", "i")),
    Internal("window", "optimizer", "reduce_independent_p_g_buckets_and_remove_grads", ("param", "i")),
    Internal("window", "optimizer", "get_gradient_for_reduction", ("param",)),
    Internal("window", "optimizer", "setup_buckets", ()),
    Internal("window", "optimizer", "use_grad_accum_attribute"),
    Internal("window", "optimizer", "gradient_accumulation_dtype"),
    Internal("window", "optimizer", "all_grad_tensors"),
    Internal("abort", "optimizer", "extra_large_param_to_reduce"),
    Internal("abort", "optimizer", "_release_ipg_buffers", ()),
)
_STAGE_3 = (
    Internal("window", "optimizer", "fp16_groups"),
    Internal("window", "optimizer", "reduce_ready_partitions_and_remove_grads", ("param",)),
    Internal("window", "optimizer", "reduce_independent_p_g_buckets_and_remove_grads", ("param",)),
)


def internals(stage: int) -> tuple[Internal, ...]:
    """What the core relies on at this ZeRO stage."""
    return (*_ENGINE, *_OPTIMIZER, *(_STAGE_3 if stage == 3 else _STAGE_1_AND_2))


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
    if engine.is_deepcompile_enabled():
        raise ValueError(
            "ZeroSync does not support DeepCompile, which reduces gradients inside compiled graphs. Set"
            " 'compile.deepcompile' to false."
        )
    if getattr(engine, "_autoep_folding_spec", None) is not None:
        raise ValueError("ZeroSync does not support AutoEP folded with tensor parallelism. Use one of the two.")
    if not isinstance(engine.optimizer, ZeROOptimizer):
        raise ValueError(
            f"ZeroSync needs an engine with an optimizer, found {type(engine.optimizer).__name__}. Pass one to"
            " deepspeed.initialize(), or name one in the DeepSpeed configuration."
        )

    owners = {"engine": engine, "optimizer": engine.optimizer}
    for internal in internals(stage):
        problem = _problem(owners[internal.owner], internal)
        if problem:
            raise _error(internal.feature, f"{type(owners[internal.owner]).__name__}.{internal.name} {problem}")
    if not hasattr(torch._C, "_current_graph_task_id"):
        raise _error("window", f"torch._C._current_graph_task_id is missing in torch {torch.__version__}")


def engine_config(engine: Any) -> dict[str, Any]:
    """The DeepSpeed configuration of ``engine`` as the user gave it, unknown blocks included.

    Raises:
        ContractError: DeepSpeed no longer keeps it.
    """
    found = getattr(engine._config, "_param_dict", None)
    if not isinstance(found, dict):
        raise _error("configuration block", "DeepSpeedConfig._param_dict is missing")
    return found


def backend() -> Any:
    """DeepSpeed's process-wide communication backend, through which all its collectives go.

    Raises:
        ContractError: there is none.
    """
    from deepspeed.comm import comm

    found = getattr(comm, "cdb", None)
    if found is None:
        raise _error("report", "deepspeed.comm.comm.cdb is missing")
    return found


def _found(owner: Any, name: str) -> bool:
    return hasattr(type(owner), name) or name in vars(owner)  # and no property is computed


def _problem(owner: Any, internal: Internal) -> str | None:
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


def _error(feature: str, found: str) -> ContractError:
    import deepspeed

    return ContractError(
        f"ZeroSync's {feature} relies on a DeepSpeed internal that has changed: {found}. Found DeepSpeed"
        f" {deepspeed.__version__}; tested with {', '.join(TESTED_DEEPSPEED)}. Install a tested version, or train"
        " without ZeroSync."
    )
