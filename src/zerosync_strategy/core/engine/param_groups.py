"""``param_groups`` of a ZeRO optimizer, as the program that made the optimizer knows them."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zerosync_strategy.core.engine.interpose import interpose


def show_parameters(optimizer: Any, groups: Sequence[Sequence[torch.nn.Parameter]]) -> None:
    """Let ``param_groups`` of a ZeRO ``optimizer`` hold the module's parameters, by group, and not its flat partitions.

    ``toggle_optimizer``, and code that freezes or looks at parameters by their optimizer, then means what it says. It
    is an ``Optimizer``, too: a scheduler that is made during the training, as the learning-rate finder's, wants one.
    """
    optimizer._zerosync_groups = groups
    interpose(optimizer, _ParamGroupsOverrides, also=(Optimizer,))


class _ParamGroupsOverrides:
    """Overrides of a ZeRO optimizer: its ``param_groups``, and what it lacks as an ``Optimizer``."""

    _zerosync_groups: Sequence[Sequence[torch.nn.Parameter]]
    optimizer: Optimizer

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @property
    def param_groups(self) -> list[Any]:
        stock: list[dict[str, Any]] = super().param_groups  # type: ignore[misc]
        return [_Group(group, params) for group, params in zip(stock, self._zerosync_groups, strict=True)]


class _Group(UserDict[str, Any]):
    """One of DeepSpeed's parameter groups, with these ``params``; all else is read and written there."""

    def __init__(self, group: dict[str, Any], params: Sequence[torch.nn.Parameter]) -> None:
        self.data = group
        self._params = params

    def __getitem__(self, key: str) -> Any:
        return self._params if key == "params" else super().__getitem__(key)
