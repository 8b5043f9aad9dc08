"""Full parameters: to read and write in place, to average, and to save when ZeRO-3 shards some over groups of ranks.

DeepSpeed collects full parameters on rank 0, whose model lacks the parameters of other groups. Here, the first rank
that shards a parameter saves it. torch's ``AveragedModel`` of a ZeRO-3 model averages full parameters (N1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel

from zerosync_strategy.core.comm.collectives import gather_objects
from zerosync_strategy.core.engine import patches, zero, zero3, zero3_optimizer
from zerosync_strategy.core.engine.parameter_states import Claim
from zerosync_strategy.core.failures.rank_status import rank_status


@contextmanager
def full_parameters(engine: Any, parameters: Iterable[torch.nn.Parameter] | None = None) -> Iterator[None]:
    """While active, ``parameters`` (by default all) are full, and what is written to them is kept. Collective.

    Those that a context around this one has gathered are its: it writes them back.
    """
    if zero.stage(engine) != 3:
        yield
        return
    params = engine.module.parameters() if parameters is None else parameters
    with _gathered([param for param in params if not _is_in_context(param)], modifier_rank=0):
        yield


def _is_in_context(param: Any) -> bool:
    record = getattr(param, "_zerosync_record", None)
    return record is not None and Claim.CONTEXT in record.claims


def full_state(engine: Any) -> dict[str, torch.Tensor]:
    """Return, in full, the parameters of the groups whose first rank this is. Collective.

    The result maps names to tensors in the dtype of training, on the CPU. The results of all ranks together are the
    model; the same name on two ranks means two parameters, of two groups. Raise ``ValueError`` if the engine is not of
    stage 3.
    """
    _check_stage(engine)
    state = {}
    for name, param in engine.module.named_parameters():
        with _gathered([param]):
            if _is_first(param):
                state[name] = param.detach().cpu().clone()
    return state


def load_full_state(engine: Any, state: Mapping[str, torch.Tensor]) -> None:
    """Set the parameters to those that ``full_state`` returned on this rank. Collective. Optimizer states stay.

    Raise ``ValueError`` on every rank, and set nothing, if on some rank ``state`` lacks a parameter of which it is the
    first rank, or has one of another shape.
    """
    _check_stage(engine)
    problem = next(_misfits(engine, state), None)
    for found in filter(None, gather_objects(problem, zero.data_parallel_group(engine.optimizer))):
        raise ValueError(f"load_full_state() needs, of full_state(), what the same rank was given: {found}")
    for name, param in engine.module.named_parameters():
        with _gathered([param], modifier_rank=0):
            if _is_first(param):
                param.data.copy_(state[name])
    zero3_optimizer.reload_master_weights(engine.optimizer)


def _gathered(params: list[Any], modifier_rank: int | None = None) -> AbstractContextManager[None]:
    from deepspeed import zero as deepspeed_zero

    gathered: AbstractContextManager[None] = deepspeed_zero.GatheredParameters(params, modifier_rank=modifier_rank)
    return gathered


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


# ---- averages ----------------------------------------------------------------------------------------------------


def let_average() -> None:
    """Make ``AveragedModel.update_parameters`` in this process gather sharded parameters. It is then collective.

    For a model without sharded parameters, it does not change.
    """
    patches.wrap(patches.MAKE_AVERAGE, _init)
    patches.wrap(patches.UPDATE_AVERAGE, _update_parameters)


def _init(
    stock: Callable[..., None], average: AveragedModel, model: torch.nn.Module, *args: Any, **kwargs: Any
) -> None:
    if problem := copy_problem(model):
        raise ValueError(f"AveragedModel() {problem}")
    stock(average, model, *args, **kwargs)


def _update_parameters(stock: Callable[..., None], average: AveragedModel, model: torch.nn.Module) -> None:
    if not any(map(zero3.is_sharded, model.parameters())):
        return stock(average, model)
    activity = rank_status().activity("AveragedModel.update_parameters()", lambda: "between two steps")
    with activity, readable(model.parameters()):
        stock(average, model)


def copy_problem(model: torch.nn.Module) -> str:
    """Return why ``model`` cannot be copied to average it, as the predicate of a sentence; empty if it can."""
    if not any(map(zero3.is_sharded, model.parameters())):
        return ""
    return (
        f"found a {type(model).__name__} whose parameters ZeRO-3 has sharded, so that a copy would have none. Average a"
        " copy that is made before the engine is built: before deepspeed.initialize() or accelerator.prepare(), and in"
        " Lightning with a new module for each fit()."
    )


def readable(parameters: Iterable[torch.nn.Parameter]) -> AbstractContextManager[None]:
    """While active, ``parameters`` are full; those that a caller has gathered stay gathered. Collective."""
    return _gathered([param for param in parameters if not zero3.is_gathered(param)])
