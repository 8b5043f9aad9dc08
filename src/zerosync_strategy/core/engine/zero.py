"""What ZeRO's engine and optimizer have in common on all stages."""

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

from zerosync_strategy.core.engine import contract, deepspeed_internals, patches
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


def _instead(current: Any, stock: Any) -> Any:
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
    """Return ``items`` in runs of at most ``limit`` together, or of one larger item."""
    runs: list[list[_Item]] = []
    room = 0
    for item in items:
        if not runs or size_of(item) > room:
            runs.append([])
            room = limit
        runs[-1].append(item)
        room -= size_of(item)
    return runs
