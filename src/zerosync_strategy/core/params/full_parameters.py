"""Full parameters of ZeRO-3 in place: to read and write, and to average by torch's ``AveragedModel`` (N1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from zerosync_strategy.core.engine import patches, zero, zero3
from zerosync_strategy.core.engine.parameter_states import CONTEXT
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
    return record is not None and bool(record.bits & CONTEXT)


def _gathered(params: list[Any], modifier_rank: int | None = None) -> AbstractContextManager[None]:
    from deepspeed import zero as deepspeed_zero

    gathered: AbstractContextManager[None] = deepspeed_zero.GatheredParameters(params, modifier_rank=modifier_rank)
    return gathered


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
