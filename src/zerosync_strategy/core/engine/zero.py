"""A ZeRO engine of any stage: what engines and optimizers have in common, and whether ZeroSync supports one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from zerosync_strategy.core.engine import contract, deepspeed_internals, patches, torch_internals
from zerosync_strategy.core.engine.contract import ContractError, Internal
from zerosync_strategy.core.engine.patches import replaced
from zerosync_strategy.core.engine.types import DeepSpeedEngine, ZeroOptimizer

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class MasterShard:
    """This rank's master weights of one flat group, as the torch optimizer has them in ``flat``.

    ``slices``: parameters, each with the begin and end of its elements in ``flat``, in this order.
    """

    flat: torch.Tensor
    slices: Sequence[tuple[nn.Parameter, int, int]]


def stage(engine: DeepSpeedEngine) -> int:
    return int(engine.zero_optimization_stage())


def user_config(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Return the DeepSpeed configuration of ``engine`` as the user gave it, including unknown blocks."""
    found = engine._config._param_dict
    if not isinstance(found, dict):
        raise contract.changed("configuration block", f"DeepSpeedConfig._param_dict is a {type(found).__name__}")
    return found


def offloads_optimizer(configured: dict[str, Any]) -> bool:
    """Return whether a DeepSpeed configuration, before there is an engine, asks for an offloaded optimizer."""
    asked = configured.get("zero_optimization", {}).get("offload_optimizer") or {}
    return bool(asked.get("device", "none") != "none")


def time_by_the_host(engine: DeepSpeedEngine) -> AbstractContextManager[None]:
    """While active, DeepSpeed measures throughput by the host's clock, unless its configuration says otherwise.

    Else the host would wait for the device before every forward and after every step, and work would not overlap. The
    option is ``"timers": {"throughput": {"synchronized": true}}``.
    """
    timers = engine._config.timers_config
    asked = user_config(engine).get("timers", {}).get("throughput", {}).get("synchronized", False)
    return replaced(timers, "synchronized", asked)


def accumulate_outside(engine: DeepSpeedEngine) -> None:
    """Make every ``step()`` of ``engine`` an optimizer step, and leave its losses unscaled.

    DeepSpeed's ``set_train_batch_size`` does this too, but miscounts the ranks under sequence parallelism.
    """
    contract.require(deepspeed_internals.ACCUMULATION, engine)
    config = engine._config
    config.train_batch_size //= config.gradient_accumulation_steps
    config.gradient_accumulation_steps = 1


def needs_every_gradient(engine: DeepSpeedEngine) -> bool:
    """Return whether the configuration makes a parameter without a gradient an error."""
    return not engine._config.zero_config.ignore_unused_parameters


def stepping_optimizer(engine: DeepSpeedEngine) -> torch.optim.Optimizer:
    """Return the torch optimizer that steps this rank's flat shards."""
    return engine.optimizer.optimizer


def step_torch_optimizer(optimizer: ZeroOptimizer) -> None:
    """Step all groups of the torch optimizer at once, through the gradient scaler of torch's autocast."""
    scaler = optimizer.torch_autocast_gradscaler
    if scaler is None:
        optimizer.optimizer.step()
    else:
        scaler.step(optimizer.optimizer)
        scaler.update()


def comm_backend() -> Any:
    """Return DeepSpeed's process-wide communication backend, which issues all its collectives."""
    from deepspeed.comm import comm

    found = getattr(comm, "cdb", None)
    if found is None:
        raise contract.changed("gathering", "deepspeed.comm.comm.cdb is missing")
    return found


def use_current_names() -> None:
    """Make DeepSpeed's backend call collectives by their names in torch 2.13, because the old names warn."""
    for patch, current in (
        (patches.GATHER, getattr(dist, "all_gather_single", None)),
        (patches.REDUCE_SCATTER, getattr(dist, "reduce_scatter_single", None)),
    ):
        if current is not None and patch.name in vars(comm_backend()):
            patches.replace(patch, partial(_instead, current))


def _instead(current: object, stock: object) -> object:
    return current


def is_plain(backend: object) -> bool:
    """Return whether DeepSpeed's ``backend`` adds only host work and a log to torch's collectives.

    For some devices, it communicates in another way.
    """
    from deepspeed.comm.torch import TorchBackend

    return isinstance(backend, TorchBackend) and torch.version.hip is None


_building = 0  # depth: frontends nest


@contextmanager
def building_engine() -> Iterator[None]:
    """While a frontend builds an engine, before :func:`use_current_names`, suppress these warnings."""
    global _building
    _building += 1
    try:
        with warnings.catch_warnings():
            names = "(all_gather_into|reduce_scatter)_tensor"
            warnings.filterwarnings("ignore", f".*torch.distributed.{names}. is deprecated", FutureWarning)
            yield
    finally:
        _building -= 1


def is_building_engine() -> bool:
    """Return whether a frontend is building an engine. The frontend attaches to it itself, if it trains."""
    return _building > 0


def messenger() -> Any:
    """Return an object with ``isend()`` and ``irecv()``; ``deepspeed.comm`` blocks before ``ASYNC_MESSAGES``."""
    from deepspeed import comm

    return comm if contract.has(deepspeed_internals.ASYNC_MESSAGES) else comm_backend()


def data_parallel_group(optimizer: ZeroOptimizer) -> dist.ProcessGroup:
    return optimizer.dp_process_group


def process_groups(engine: DeepSpeedEngine) -> list[dist.ProcessGroup]:
    """Return the process groups over which ``engine`` shards parameters, gradients or states."""
    optimizer = engine.optimizer
    if stage(engine) == 3:
        groups = [param.ds_process_group for param in engine.module.parameters() if hasattr(param, "ds_process_group")]
    else:
        groups = list(optimizer.real_dp_process_group)
    return list(dict.fromkeys([data_parallel_group(optimizer), *groups]))


def accumulation_dtype(optimizer: ZeroOptimizer) -> torch.dtype:
    """Return the dtype in which gradients are summed over the backwards of a step."""
    return optimizer.gradient_accumulation_dtype


def reduction_dtype(engine: DeepSpeedEngine) -> torch.dtype:
    """Return the dtype in which gradients are reduced: as configured, else one wide enough for the summed ones."""
    optimizer = engine.optimizer
    dtype: torch.dtype = optimizer.communication_data_type
    if user_config(engine).get("communication_data_type") is not None:
        return dtype
    return torch.promote_types(dtype, accumulation_dtype(optimizer))


def expect_backward(optimizer: ZeroOptimizer) -> None:
    """Tell ``optimizer`` that the next backward is not nested in another.

    DeepSpeed counts one entry for every forward that a backward passes, but one exit. So after a backward through two
    forwards, it would treat the next ``loss.backward()`` as a nested one.
    """
    optimizer._backward_active_depth = 0


def expect_end(engine: DeepSpeedEngine) -> None:
    """Make DeepSpeed do its work at the end of the running backward; 0.18.4 does it in the last gradient hook."""
    if not contract.has(deepspeed_internals.CLEAR_BACKWARD):
        torch.autograd.Variable._execution_engine.queue_callback(engine.optimizer.run_grad_acc_post_hooks)


def reset_backward(optimizer: ZeroOptimizer) -> None:
    """Reset the state of ``optimizer`` after a backward that raised."""
    optimizer._backward_active_depth = 0
    if contract.has(deepspeed_internals.CLEAR_BACKWARD):
        optimizer.clear_backward_seen_flag()


def sum_of_squares(shards: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the squares of all elements of at least one tensor, a scalar in fp64.

    The norm of a shard may overflow its own dtype: fp16 ends at 65,504.
    """
    wide = [(shard, torch.promote_types(shard.dtype, torch.float32)) for shard in shards]
    norms = [torch.linalg.vector_norm(shard, dtype=dtype) for shard, dtype in wide]
    return torch.stack([norm.double() for norm in norms]).square().sum()


def offloads(optimizer: ZeroOptimizer) -> bool:
    """Return whether the optimizer's states are on the host or on disk."""
    return bool(getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False))


def computes_norm(optimizer: ZeroOptimizer) -> bool:
    """Return whether the next step computes the norm of the gradients, as it does unless it is told not to."""
    return bool(getattr(optimizer, deepspeed_internals.COMPUTES_NORM.name, True))


def swap_clip_norm(optimizer: ZeroOptimizer, norm: float) -> float:
    """Set the gradient norm to which ``optimizer`` clips, 0 for no clipping; return the previous one.

    Clipping needs the norm, so it is computed then even if DeepSpeed's ``compute_grad_norm`` is false.
    """
    before, optimizer.clip_grad = optimizer.clip_grad, norm
    computes = deepspeed_internals.COMPUTES_NORM.name
    asked = vars(optimizer).setdefault("_zerosync_asked_for_norm", getattr(optimizer, computes, None))
    if asked is not None:
        setattr(optimizer, computes, asked or norm > 0)
    return before


def listed(names: Sequence[str], shown: int = 5) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def in_chunks(items: Iterable[_Item], limit: int, size_of: Callable[[_Item], int]) -> list[list[_Item]]:
    """Divide ``items``, in order, into chunks whose sizes sum to at most ``limit``, or of one larger item."""
    chunks: list[list[_Item]] = []
    room = 0
    for item in items:
        if not chunks or size_of(item) > room:
            chunks.append([])
            room = limit
        chunks[-1].append(item)
        room -= size_of(item)
    return chunks


# ---- support ---------------------------------------------------------------------------------------------------------


def require_supported(engine: DeepSpeedEngine) -> None:
    """Check that ZeroSync supports ``engine``, and that it has every internal that ZeroSync uses on it.

    ``TypeError``: it is not a ``DeepSpeedEngine``. ``ValueError``: its configuration is not supported.
    """
    check_release()
    contract.require(torch_internals.TRAINING)
    _check_configuration(engine)
    require_supported_optimizer(engine)
    contract.require(internals_of(engine), engine)
    if user_config(engine).get("compile", {}).get("deepcompile"):
        contract.need(deepspeed_internals.COMPILE_BACKEND, "set 'compile.deepcompile' to false")
    if getattr(engine.optimizer, "swap_optimizer", False):
        contract.need(deepspeed_internals.STEPPED_OFFLOADED, "offload the optimizer to the CPU")
    if engine.is_deepcompile_active():
        raise ValueError(
            "attach() found an engine that DeepCompile has compiled already, and its graphs reduce gradients by"
            " themselves. Call engine.compile() after attach()."
        )


def internals_of(engine: DeepSpeedEngine) -> tuple[Internal, ...]:
    """Return the internals that ZeroSync uses on an engine of this stage, without optional features."""
    is_3 = engine.zero_optimization_stage() == 3
    of_stage = deepspeed_internals.STAGE_3 if is_3 else deepspeed_internals.STAGE_1_2
    return (*deepspeed_internals.ALL_STAGES, *deepspeed_internals.REFUSED, *of_stage)


def trains(engine: DeepSpeedEngine) -> bool:
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    return engine.optimizer is not None and not isinstance(engine.optimizer, DeepSpeedZeRoOffload)


def without_zero(engine: DeepSpeedEngine) -> str:
    """Return how ``engine`` is parallel if not by ZeRO; empty if by ZeRO."""
    from deepspeed.runtime.engine import PipelineModule

    if isinstance(engine.module, PipelineModule):
        return "with pipeline parallelism"
    return "" if engine.zero_optimization_stage() in (1, 2, 3) else "without ZeRO (stage 0)"


def check_release() -> None:
    """Raise a ``ContractError`` if the installed DeepSpeed is too old."""
    oldest, found = contract.DEEPSPEED.oldest, contract.release_of("deepspeed")
    if contract.is_before(found, oldest):
        raise ContractError(
            f"ZeroSync needs DeepSpeed {oldest} or newer, found {found}. DeepSpeed 0.17 and older reduce gradients"
            " inside of engine.backward() and do not notice a loss.backward() of the program; what later releases have"
            " for it changed until 0.18.4. Install a newer DeepSpeed, or train without ZeroSync."
        )


def require_supported_optimizer(engine: DeepSpeedEngine) -> None:
    """Raise ``ValueError`` if DeepSpeed makes, by its configuration, an optimizer that ZeroSync does not support."""
    of_optimizer = user_config(engine).get("optimizer") or {}
    if str(of_optimizer.get("type")).lower() == "muon":
        raise ValueError(
            "ZeroSync does not support DeepSpeed's own Muon, found in 'optimizer.type'. Leave that out, and give"
            " deepspeed.initialize() an optimizer: torch.optim.Muon, or a class with groups for what is no matrix."
        )


def _check_configuration(engine: DeepSpeedEngine) -> None:
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.engine import PipelineModule

    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(f"attach() takes the engine that deepspeed.initialize() returned, got {type(engine).__name__}.")
    contract.require(deepspeed_internals.CONFIGURATION, engine)
    stage, optimizer = int(engine.zero_optimization_stage()), engine.optimizer
    given, folding = user_config(engine), getattr(engine, "_autoep_folding_spec", None)
    of_zero = given.get("zero_optimization", {})
    for is_so, problem in (
        (stage not in (1, 2, 3), f"needs ZeRO stage 1, 2 or 3, found 'zero_optimization.stage' = {stage}."),
        (isinstance(engine.module, PipelineModule),
         "does not support DeepSpeed pipeline parallelism; use a plain module."),
        (isinstance(optimizer, BF16_Optimizer),
         "does not support DeepSpeed's BF16_Optimizer, which ZeRO stage 1 with bf16 parameters and"
         " 'data_types.grad_accum_dtype' = 'fp32' selects. Use stage 2, or leave grad_accum_dtype out."),
        (of_zero.get("zenflow"),
         "does not support ZenFlow; remove 'zero_optimization.zenflow' from the configuration."),
        (of_zero.get("mics_shard_size", -1) > 0,
         "does not support MiCS; remove 'zero_optimization.mics_shard_size'."),
        (of_zero.get("zero_quantized_gradients"),
         "does not support quantized gradients; set 'zero_quantized_gradients' to false."),
        (getattr(folding, "tp_size", 1) > 1,
         "does not support AutoEP folded with tensor parallelism. Use one of the two."),
        (not isinstance(optimizer, ZeROOptimizer),
         f"needs an engine with an optimizer, found {type(optimizer).__name__}. Pass one to deepspeed.initialize(), or"
         " name one in the DeepSpeed configuration."),
    ):  # fmt: skip
        if is_so:
            raise ValueError(f"ZeroSync {problem}")
