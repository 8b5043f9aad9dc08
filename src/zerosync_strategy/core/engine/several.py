"""Several engines over one module, each with an optimizer and a part of the parameters.

The first engine wraps the module itself. Forwards run through it, and under ZeRO-3 its hooks gather the parameters of
all engines. Every other engine wraps a *parameter tree*: modules that are never called, with those parameters of the
module that its optimizer trains, the same objects under the same names. So each engine shards, steps and saves its own
parameters, and receives gradients by the hooks that DeepSpeed sets on each of them.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zerosync_strategy.core.engine import contract, deepspeed_internals, zero
from zerosync_strategy.core.engine.patches import Stock, interpose
from zerosync_strategy.core.engine.types import DeepSpeedEngine, ZeroOptimizer

_FIRST = "_zerosync_first"  # in the __dict__ of an engine that has only some parameters of a module


def parameter_tree(module: nn.Module, parameters: Collection[nn.Parameter]) -> nn.Module:
    """Return modules that are never called, with ``parameters`` of ``module`` under their names in it."""
    tree = nn.Module()
    for name, param in module.named_parameters():
        if param not in parameters:
            continue
        *path, leaf = name.split(".")
        owner = tree
        for step in path:
            if step not in owner._modules:
                owner.add_module(step, nn.Module())
            owner = owner.get_submodule(step)
        owner.register_parameter(leaf, param)
    return tree


def restrict(engine: DeepSpeedEngine, tree: nn.Module, first: DeepSpeedEngine) -> None:
    """Restrict ``engine`` to the parameters of ``tree``; ``first`` is the engine of the whole module.

    On ZeRO-1 and 2, an engine touches only the parameters of its optimizer. On ZeRO-3, its step would release and
    gather all parameters of its module, and hooks on a parameter tree never run. ``engine`` may be ``first``, which
    keeps the parameters that no optimizer trains.
    """
    if zero.stage(engine) != 3:
        return
    contract.require(deepspeed_internals.SEVERAL_ENGINES, engine)
    from deepspeed.runtime.zero import partition_parameters

    optimizer, params = engine.optimizer, set(tree.parameters())
    offload = optimizer.parameter_offload
    for module in tree.modules():
        partition_parameters._init_external_params(module)  # as the module of an engine has
    offload.module = optimizer.module = tree
    persistent = [param for param in optimizer.persistent_parameters if param in params]
    offload.persistent_parameters = optimizer.persistent_parameters = persistent
    vars(engine)[_FIRST] = first  # vars(): must not become a submodule


def first_of(engine: DeepSpeedEngine) -> DeepSpeedEngine:
    """Return the engine of the whole module, whose hooks run, even if ``engine`` has only some of its parameters."""
    return vars(engine).get(_FIRST, engine)


@contextmanager
def requiring_grad(parameters: Collection[nn.Parameter], value: bool) -> Iterator[None]:
    """While active, the ``requires_grad`` of ``parameters`` is ``value``.

    ZeRO trains only parameters that require a gradient when its engine is built. ZeRO-3 saves and loads parameters
    outside of its optimizer only if they require none.
    """
    changed = [param for param in parameters if param.requires_grad is not value]
    for param in changed:
        param.requires_grad_(value)
    try:
        yield
    finally:
        for param in changed:
            param.requires_grad_(not value)


def show_parameters(optimizer: ZeroOptimizer, groups: Sequence[Sequence[nn.Parameter]]) -> None:
    """Make ``param_groups`` of a ZeRO ``optimizer`` hold the module's parameters, by group, instead of flat partitions.

    ``toggle_optimizer``, and code that freezes or inspects parameters through their optimizer, then works. The
    optimizer becomes an ``Optimizer``, too, which schedulers made during training require, such as the learning-rate
    finder's.
    """
    optimizer._zerosync_groups = groups
    interpose(optimizer, _ParamGroupsOverrides, also=(Optimizer,))


class _ParamGroupsOverrides(Stock):
    """Overrides of a ZeRO optimizer: its ``param_groups``, and the attributes that it lacks as an ``Optimizer``."""

    _zerosync_groups: Sequence[Sequence[nn.Parameter]]
    optimizer: Optimizer

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @property
    def param_groups(self) -> list[_GroupView]:
        return groups_of(super().param_groups, self._zerosync_groups)


def groups_of(groups: Sequence[Any], params: Sequence[Sequence[nn.Parameter]]) -> list[_GroupView]:
    """Return DeepSpeed's ``groups`` with the module's ``params``, by group."""
    return [_GroupView(group, of_group) for group, of_group in zip(groups, params, strict=True)]


def shows_parameters(groups: Sequence[object]) -> bool:
    """Return whether ``groups`` are those of :func:`groups_of`."""
    return bool(groups) and isinstance(groups[0], _GroupView)


class _GroupView(UserDict[str, Any]):
    """One of DeepSpeed's parameter groups, with other ``params``; all else is read from and written to the group."""

    def __init__(self, group: dict[str, Any], params: Sequence[nn.Parameter]) -> None:
        self.data = group
        self._params = params

    def __getitem__(self, key: str) -> Any:
        return self._params if key == "params" else super().__getitem__(key)

    def __setitem__(self, key: str, value: object) -> None:
        if key == "params":
            raise ValueError(
                "param_groups[...]['params'] was to be replaced, but a DeepSpeed engine lays out what it trains when it"
                " is built. Give the optimizer all parameters before that, and freeze after it those that are to train"
                " later."
            )
        super().__setitem__(key, value)
