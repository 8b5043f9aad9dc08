"""ZeRO-3: which modules are gathered as a whole, the *units*: a transformer block instead of each of its layers.

DeepSpeed gathers for every module that has parameters of its own. For a block of nine parameters, the host then runs
nine pairs of hooks and the network sends nine messages, where one would do.

A unit is a module with a forward and with parameters in several modules. The first of these that applies chooses the
units:

- the classes that the option ``unit_modules`` names;
- the classes that the model says not to split (``_no_split_modules``, which transformers, Accelerate and FSDP use);
- children of a ``ModuleList`` or ``Sequential`` with siblings of the same class. If they contain units of this kind,
  as two towers of blocks do, the inner ones are the units, unless the outer ones are small.

Modules that the program has made DeepSpeed leaf modules are units, too. A unit that is too large is divided among its
children. Parameters in no unit are gathered by module. PyTorch's FSDP wraps models in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from zerosync_strategy.core.engine import gathering, zero3
from zerosync_strategy.core.engine.parameter import Record
from zerosync_strategy.core.engine.torch_internals import untransformed
from zerosync_strategy.core.engine.transformers import not_split
from zerosync_strategy.core.engine.types import DeepSpeedEngine, Zero3Parameter

FORWARD, REUSE, GRAPH, STEP = "forward", "reuse", "graph", "step"
"""Claims of a unit: a forward runs; another is expected soon; a graph may need it at any time, until a backward has
ended; others may use its memory at any time, until the step."""
RUNNING = "_zerosync_running"  # in the __dict__ of a module with parameters: a forward that uses them is running


@dataclass
class HeldChunk:
    """Held parameters that are gathered by one message.

    Attributes:
        index: among all chunks; the chunks of a process group are contiguous.
        group: the index of the process group in the order of gathers (U1).
        params: in the order in which they were built.
        issued: in this window, the gather of what was sharded has been issued.
    """

    index: int
    group: int
    params: list[Zero3Parameter]
    issued: bool = False


class Unit:
    """A module whose parameters are gathered together.

    Attributes:
        params: its parameters, in the order of gathers; empty for a model whose parameters are all in inner units.
        running: how many of its forwards are running.
        claims: why its values stay: :data:`FORWARD`, :data:`REUSE`, :data:`GRAPH`, :data:`STEP`, and the ids of the
            autograd graph tasks (backwards) that have reached it and not left it. They are one claim of its records.
        marks: the attributes of its modules that have parameters, in which :data:`RUNNING` says whether one is.
        held: the chunks in which it is gathered, if all its parameters are held until the step; else ``None``.
        pending: it has not waited for these chunks in this window, or some stream may still have to wait for them.
    """

    def __init__(self, module: nn.Module, params: Iterable[Zero3Parameter], is_whole: bool) -> None:
        self.module = module
        self.marks = [vars(each) for each in (module.modules() if is_whole else [module]) if vars(each)["_parameters"]]
        self.params = sorted(params, key=zero3.param_id)
        self.numel = sum(map(zero3.full_numel, self.params))
        self.running = 0
        self.claims: set[str | int] = set()
        self.held: list[HeldChunk] | None = None
        self.pending = True
        for attributes in self.marks:
            attributes[RUNNING] = False

    def __deepcopy__(self, memo: object) -> Unit:
        return self  # for a copied module (unit_hooks.py)

    @cached_property
    def addresses(self) -> list[int]:
        return list(map(id, self.params))

    @cached_property
    def records(self) -> list[Record]:
        return [param._zerosync_record for param in self.params]

    def is_in(self, outputs: Iterable[torch.Tensor]) -> bool:
        """Return whether one of ``outputs`` is a parameter of the unit, which has its values, or shares its memory."""
        with zero3.as_it_is():
            memories = {param.untyped_storage()._cdata for param in self.params}
            return any(
                untransformed(output).untyped_storage()._cdata in memories
                for output in outputs
                if output.layout is torch.strided
            )


class Units:
    """The units of the module of ``engine``: whole modules, modules with own parameters, and the module itself.

    Raise ``ValueError`` if the module has none of the classes ``names``.

    Attributes:
        every: all units, outer ones first.
        counts: the number of units gathered as a whole, by class name.
        most_bytes: bytes of the largest of them.
    """

    def __init__(self, engine: DeepSpeedEngine, names: Collection[str]) -> None:
        module, config = engine.module, gathering.config_of(engine)
        classes = {type(each).__name__ for each in module.modules()}
        if unknown := [name for name in names if name not in classes]:
            raise ValueError(
                f"ZeroSync option 'unit_modules' got {unknown[0]!r}, and the {type(module).__name__} has no module of"
                f" that class. It has: {', '.join(sorted(classes))}."
            )
        whole = set(names) or not_split(module) & classes
        limit, small = config.max_live_parameters // 2, config.prefetch_bucket_size
        wholes = set(map(id, _units(module, whole, limit, small, set())))
        wholes.update(id(each) for each in module.modules() if gathering.is_leaf(each))
        self.every = list(_every(module, wholes))
        found = [unit.module for unit in self.every if id(unit.module) in wholes]
        self.counts = Counter(type(each).__name__ for each in found)
        self.most_bytes = max((_sum(zero3.full_bytes, each) for each in found), default=0)

    def gather_together(self) -> None:
        """Let the parameters of a unit, but those of several units, share a storage. They have records by now."""
        for unit in self.every:
            for record in unit.records:
                record.units += (unit,)


def _every(root: nn.Module, wholes: Collection[int]) -> Iterator[Unit]:
    """Yield the units of ``root``: modules with an id in ``wholes``, and modules with parameters outside of those."""
    below = {
        id(each) for whole in root.modules() if id(whole) in wholes for each in whole.modules() if each is not whole
    }
    for module in root.modules():
        if id(module) in below:
            continue
        is_whole = id(module) in wholes
        params = list(filter(zero3.is_sharded, gathering.parameters_of(module, is_whole)))
        if params or module is root:
            yield Unit(module, params, is_whole)


def _units(
    module: nn.Module, classes: Collection[str], limit: int, small: int, alike: Collection[int]
) -> Iterator[nn.Module]:
    """Yield the modules in ``module`` that are units. ``alike``: ids of modules with siblings of the same class.

    A unit has at most ``limit`` elements. Without ``classes``, a candidate of more than ``small`` elements gives way to
    candidates inside it.
    """
    if gathering.is_leaf(module):
        return
    is_meant = type(module).__name__ in classes if classes else id(module) in alike
    if is_meant and not classes and _sum(zero3.full_numel, module) > small and _has_alike(module):
        is_meant = False
    if is_meant and _is_whole(module):
        if _sum(zero3.full_numel, module) <= limit:
            yield module
            return
        classes, alike = (), set(map(id, module.children()))
    elif not classes:
        alike = {*alike, *_alike(module)}
    for child in module.children():
        yield from _units(child, classes, limit, small, alike)


def _alike(module: nn.Module) -> set[int]:
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return set()
    counts = Counter(type(child) for child in module)
    return {id(child) for child in module if counts[type(child)] > 1}


def _has_alike(module: nn.Module) -> bool:
    """Return whether ``module`` contains units that have siblings of the same class."""
    alike = {each for outer in module.modules() for each in _alike(outer)}
    return any(id(each) in alike and _is_whole(each) for each in module.modules())


def _is_whole(module: nn.Module) -> bool:
    """Return whether ``module`` has a forward, and sharded parameters in several modules."""
    if type(module).forward is nn.Module.forward:
        return False
    owners = [each for each in module.modules() if any(map(zero3.is_sharded, each._parameters.values()))]
    return len(owners) > 1


def _sum(of: Callable[[Zero3Parameter], int], module: nn.Module) -> int:
    return sum(map(of, filter(zero3.is_sharded, module.parameters())))
