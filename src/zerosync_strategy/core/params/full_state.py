"""Full parameters: to read and write in place, and to save where ZeRO-3 shards some over groups of ranks.

DeepSpeed collects full parameters on rank 0, whose model lacks those of other groups. Here each is saved on the first
rank that shards it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import gather_objects
from zerosync_strategy.core.engine import zero, zero3, zero3_optimizer


@contextmanager
def full_parameters(engine: Any, parameters: Iterable[torch.nn.Parameter] | None = None) -> Iterator[None]:
    """While active, parameters of ``engine`` have their values, and keep what is written to them. Collective.

    Args:
        parameters: which; by default all of the engine's module.
    """
    from deepspeed import zero as deepspeed_zero

    if zero.stage(engine) != 3:
        yield
        return
    params = list(engine.module.parameters() if parameters is None else parameters)
    with deepspeed_zero.GatheredParameters(params, modifier_rank=0):
        yield


def full_state(engine: Any) -> dict[str, torch.Tensor]:
    """Return in full the parameters of the groups whose first rank this is. A collective call.

    Raises:
        ValueError: the engine is not of stage 3.

    Returns:
        By name, in the dtype of training, on the CPU. All ranks' together are the model; the same name on two ranks is
        two parameters, of two groups.
    """
    from deepspeed import zero as deepspeed_zero

    _check_stage(engine)
    state = {}
    for name, param in engine.module.named_parameters():
        with deepspeed_zero.GatheredParameters([param]):
            if _is_first(param):
                state[name] = param.detach().cpu().clone()
    return state


def load_full_state(engine: Any, state: Mapping[str, torch.Tensor]) -> None:
    """Set the parameters to those that ``full_state`` gave this rank. A collective call. Optimizer states stay.

    Raises:
        ValueError: on every rank, if on some rank ``state`` lacks a parameter that the rank is the first to shard, or
            has one of another shape. Nothing is set then.
    """
    from deepspeed import zero as deepspeed_zero

    _check_stage(engine)
    problem = next(_misfits(engine, state), None)
    for found in filter(None, gather_objects(problem, zero.data_parallel_group(engine.optimizer))):
        raise ValueError(f"load_full_state() needs, of full_state(), what the same rank was given: {found}")
    for name, param in engine.module.named_parameters():
        with deepspeed_zero.GatheredParameters([param], modifier_rank=0):
            if _is_first(param):
                param.data.copy_(state[name])
    zero3_optimizer.reload_master_weights(engine.optimizer)


def _check_stage(engine: Any) -> None:
    if zero.stage(engine) != 3:
        raise ValueError(
            f"full_state() and load_full_state() are for ZeRO stage 3, found stage {zero.stage(engine)},"
            " where every rank has all parameters. Use the state_dict of the module."
        )


def _misfits(engine: Any, state: Mapping[str, torch.Tensor]) -> Iterator[str]:
    for name, param in engine.module.named_parameters():
        found = tuple(state[name].shape) if name in state else None
        if _is_first(param) and found != zero3.full_shape(param):
            yield f"{name!r} of shape {zero3.full_shape(param)} on rank {dist.get_rank()}, where it found {found}."


def _is_first(param: Any) -> bool:
    return dist.get_rank(zero3.process_group(param)) == 0
