"""Several engines over one module, each with an optimizer and a part of the parameters.

The first engine wraps the module itself. Forwards run through it, and under ZeRO-3 its hooks gather whatever parameters
a module needs, whoever steps them. Every other engine wraps a *part*: a tree of modules that is never called and holds
the parameters of its optimizer, the very objects, under their names in the module. So each engine partitions, steps and
saves its own parameters, and gradients reach it by the hooks that DeepSpeed sets on each of them.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zerosync_strategy.core.engine import contract, deepspeed_internals, zero
from zerosync_strategy.core.engine.interpose import Stock, interpose

_FIRST = "_zerosync_first"  # in the __dict__ of an engine that answers for a part of a module


def part_of(module: nn.Module, parameters: Collection[nn.Parameter]) -> nn.Module:
    """The ``parameters`` of ``module``, under their names in it, in modules that are never called."""
    part = nn.Module()
    for name, param in module.named_parameters():
        if param not in parameters:
            continue
        *path, leaf = name.split(".")
        owner = part
        for step in path:
            if step not in owner._modules:
                owner.add_module(step, nn.Module())
            owner = owner.get_submodule(step)
        owner.register_parameter(leaf, param)
    return part


def restrict(engine: Any, part: nn.Module, first: Any) -> None:
    """Let ``engine`` answer for the parameters of ``part`` alone, next to ``first``, which wraps the whole module.

    On ZeRO-1 and 2 an engine touches no parameters but those of its optimizer. On ZeRO-3 its step would release and
    gather again whatever its module holds, and an engine over a part has no hooks that run. ``engine`` may be
    ``first``, which has the parameters that no optimizer trains.
    """
    if zero.stage(engine) != 3:
        return
    contract.require(deepspeed_internals.SEVERAL_ENGINES, engine)
    from deepspeed.runtime.zero import partition_parameters

    optimizer, params = engine.optimizer, set(part.parameters())
    offload = optimizer.parameter_offload
    for module in part.modules():
        partition_parameters._init_external_params(module)  # what an engine's own module has been given
    offload.module = optimizer.module = part
    persistent = [param for param in optimizer.persistent_parameters if param in params]
    offload.persistent_parameters = optimizer.persistent_parameters = persistent
    vars(engine)[_FIRST] = first  # no module of its own


def first_of(engine: Any) -> Any:
    """Return the engine whose hooks run in the module of which ``engine`` has a part, or all."""
    return vars(engine).get(_FIRST, engine)


@contextmanager
def requiring_grad(parameters: Collection[nn.Parameter], value: bool) -> Iterator[None]:
    """While active, ``parameters`` need a gradient, or do not.

    ZeRO trains only what needs one while its engine is built. ZeRO-3 saves and loads what is in no optimizer only if it
    needs none.
    """
    changed = [param for param in parameters if param.requires_grad is not value]
    for param in changed:
        param.requires_grad_(value)
    try:
        yield
    finally:
        for param in changed:
            param.requires_grad_(not value)


def show_parameters(optimizer: Any, groups: Sequence[Sequence[nn.Parameter]]) -> None:
    """Let ``param_groups`` of a ZeRO ``optimizer`` hold the module's parameters, by group, and not its flat partitions.

    ``toggle_optimizer``, and code that freezes or looks at parameters by their optimizer, then means what it says. It
    is an ``Optimizer``, too: a scheduler that is made during the training, as the learning-rate finder's, wants one.
    """
    optimizer._zerosync_groups = groups
    interpose(optimizer, _ParamGroupsOverrides, also=(Optimizer,))


class _ParamGroupsOverrides(Stock):
    """Overrides of a ZeRO optimizer: its ``param_groups``, and what it lacks as an ``Optimizer``."""

    _zerosync_groups: Sequence[Sequence[nn.Parameter]]
    optimizer: Optimizer

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @property
    def param_groups(self) -> list[Any]:
        stock: list[dict[str, Any]] = super().param_groups
        return [_Group(group, params) for group, params in zip(stock, self._zerosync_groups, strict=True)]


class _Group(UserDict[str, Any]):
    """One of DeepSpeed's parameter groups, with these ``params``; all else is read and written there."""

    def __init__(self, group: dict[str, Any], params: Sequence[nn.Parameter]) -> None:
        self.data = group
        self._params = params

    def __getitem__(self, key: str) -> Any:
        return self._params if key == "params" else super().__getitem__(key)
