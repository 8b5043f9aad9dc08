"""torch's ``AveragedModel`` of a ZeRO-3 model: its average is one of full parameters (N1)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from zerosync_strategy.core.engine import patches, zero3
from zerosync_strategy.core.failures.rank_status import rank_status


def let_average() -> None:
    """Let ``AveragedModel.update_parameters`` in this process gather what ZeRO-3 has sharded; it is then collective.

    Of a model that ZeRO-3 does not shard it does what it did.
    """
    patches.replace(patches.MAKE_AVERAGE, _init)
    patches.replace(patches.UPDATE_AVERAGE, _update_parameters)


def _init(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def init(average: AveragedModel, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if problem := copy_problem(model):
            raise ValueError(f"AveragedModel() {problem}")
        stock(average, model, *args, **kwargs)

    return init


def _update_parameters(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def update_parameters(average: AveragedModel, model: torch.nn.Module) -> None:
        if not any(map(zero3.is_sharded, model.parameters())):
            return stock(average, model)
        activity = rank_status().activity("AveragedModel.update_parameters()", lambda: "between two steps")
        with activity, readable(model.parameters()):
            stock(average, model)

    return update_parameters


def copy_problem(model: torch.nn.Module) -> str:
    """Return why ``model`` cannot be copied to average it, after the name of who would; empty if it can."""
    if not any(map(zero3.is_sharded, model.parameters())):
        return ""
    return (
        f"found a {type(model).__name__} whose parameters ZeRO-3 has sharded, so that a copy would have none. Average a"
        " copy that is made before the engine is built: before deepspeed.initialize() or accelerator.prepare(), and in"
        " Lightning with a new module for each fit()."
    )


@contextmanager
def readable(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """While active, ``parameters`` have their values; those that a caller has gathered stay gathered. Collective."""
    from deepspeed import zero

    released = [param for param in parameters if not zero3.is_gathered(param)]
    with zero.GatheredParameters(released):
        yield
