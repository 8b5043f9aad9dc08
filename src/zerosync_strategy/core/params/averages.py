"""torch's ``AveragedModel`` of a ZeRO-3 model: its average is one of full parameters (N1)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.failures.rank_status import rank_status


@functools.cache
def let_average() -> None:
    """Let ``AveragedModel.update_parameters`` in this process gather what ZeRO-3 has sharded; it is then collective.

    Of a model that ZeRO-3 does not shard it does what it did.
    """
    make, update = AveragedModel.__init__, AveragedModel.update_parameters

    @functools.wraps(make)
    def init(average: AveragedModel, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if problem := copy_problem(model):
            raise ValueError(f"AveragedModel() {problem}")
        make(average, model, *args, **kwargs)

    @functools.wraps(update)
    def update_parameters(average: AveragedModel, model: torch.nn.Module) -> None:
        activity = rank_status().activity("AveragedModel.update_parameters()", lambda: "between two steps")
        with activity, readable(model.parameters()):
            update(average, model)

    changed: Any = AveragedModel
    changed.__init__, changed.update_parameters = init, update_parameters


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
