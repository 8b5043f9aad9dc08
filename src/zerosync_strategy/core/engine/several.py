"""Several engines over one module, each with an optimizer and a part of the parameters.

The first engine wraps the module itself. Forwards run through it, and under ZeRO-3 its hooks gather whatever parameters
a module needs, whoever steps them. Every other engine wraps a *part*: a tree of modules that is never called and holds
the parameters of its optimizer, the very objects, under their names in the module. So each engine partitions, steps and
saves its own parameters, and gradients reach it by the hooks that DeepSpeed sets on each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from zerosync_strategy.core.engine import gathering, zero


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
    gather again whatever its module holds, and an engine over a part has no hooks that run.

    Args:
        engine: may be ``first`` itself.
        part: every parameter is in the part of one engine; ``first`` has those that no optimizer trains.

    Raises:
        ContractError: DeepSpeed's internals are not those that this relies on (C1).
    """
    if zero.stage(engine) == 3:
        gathering.restrict(engine, first, part)


def as_frozen(parameters: Collection[nn.Parameter]) -> AbstractContextManager[None]:
    """While active, ``parameters`` need no gradient: ZeRO-3 saves and loads what is in no optimizer only if frozen."""
    return _requiring_grad(parameters, False)


def as_trained(parameters: Collection[nn.Parameter]) -> AbstractContextManager[None]:
    """While active, ``parameters`` need a gradient: ZeRO trains only what needs one while its engine is built."""
    return _requiring_grad(parameters, True)


@contextmanager
def _requiring_grad(parameters: Collection[nn.Parameter], value: bool) -> Iterator[None]:
    changed = [param for param in parameters if param.requires_grad is not value]
    for param in changed:
        param.requires_grad_(value)
    try:
        yield
    finally:
        for param in changed:
            param.requires_grad_(not value)
