"""ZeRO-3: which modules are gathered as a whole, *units*: a transformer block, and not each of its layers.

DeepSpeed gathers for every module with parameters of its own. A block of nine parameters then costs the host nine turns
of hooks, and the network nine messages, where one would do.

A unit is a module with a forward, and with parameters in several modules. Which are, in this order: those that the
option ``unit_modules`` names by their classes; those that the program has made leaf modules for DeepSpeed; those that
the model says not to split (``_no_split_modules``, by which transformers, Accelerate and FSDP go); without such a word,
the children of a ``ModuleList`` or ``Sequential`` that are alike; where such have others in them, as two towers of
blocks, the inner ones, unless the outer are small. A unit that is too large is divided among its children. What is in
no unit is gathered by module. PyTorch's FSDP wraps models in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import nn

from zerosync_strategy.core.engine import contract, gathering, unit_hooks, zero3
from zerosync_strategy.core.engine.transformers import not_split


class Units:
    """The units of the module of ``engine``, which DeepSpeed's hooks gather as wholes until :meth:`detach`.

    A ``ValueError``: the module has none of the classes ``names``.

    Attributes:
        counts: how many there are, by the name of their class.
        most_bytes: of the largest.
    """

    def __init__(self, engine: Any, names: Collection[str], chooses: bool) -> None:
        contract.require(contract.UNITS, engine)
        self._engine = engine
        module, limit = engine.module, unit_hooks.max_unit_numel(engine)
        classes = {type(each).__name__ for each in module.modules()}
        if unknown := [name for name in names if name not in classes]:
            raise ValueError(
                f"ZeroSync option 'unit_modules' got {unknown[0]!r}, and the {type(module).__name__} has no module of"
                f" that class. It has: {', '.join(sorted(classes))}."
            )
        self._chosen: list[nn.Module] = []
        if names or chooses:
            whole = set(names) or not_split(module) & classes
            self._chosen = list(_units(module, whole, limit, gathering.prefetched_numel(engine), set()))
        if self._chosen:
            unit_hooks.gather_as_wholes(engine, self._chosen)
        found = [each for each in module.modules() if unit_hooks.is_unit(each)]
        self.counts = Counter(type(unit).__name__ for unit in found)
        self.most_bytes = max(map(_nbytes, found), default=0)
        self._of: dict[Any, tuple[Any, ...]] = {}  # by parameter, all of its unit, the first that has it
        for unit in found:
            members = tuple(filter(zero3.is_sharded, unit.parameters()))
            for param in members:
                self._of.setdefault(param, members)

    def completed(self, params: Iterable[Any]) -> Iterable[Any]:
        """Return ``params``, which DeepSpeed gathers or gathers ahead, with what is missing of their units.

        DeepSpeed gathers ahead so many elements, in the middle of a unit if need be, which were two messages.
        """
        if not self._of:
            return params
        found = dict.fromkeys(params)
        units = {id(members): members for param in found if (members := self._of.get(param)) and not _is_held(param)}
        for members in units.values():
            found.update((param, None) for param in members if zero3.is_released(param) and not _is_held(param))
        return found

    def detach(self) -> None:
        if self._chosen:
            unit_hooks.gather_as_wholes(self._engine, self._chosen, False)


def _units(
    module: nn.Module, classes: Collection[str], limit: int, small: int, alike: Collection[int]
) -> Iterator[nn.Module]:
    """Yield the units in ``module``; ``alike``: the ids of modules that have others like them.

    Units have at most ``limit`` elements; up to ``small`` ones, those that are alike may have alike ones in them.
    """
    if unit_hooks.is_unit(module):
        return
    is_meant = type(module).__name__ in classes if classes else id(module) in alike
    if is_meant and not classes and _numel(module) > small and _has_alike(module):
        is_meant = False
    if is_meant and _is_whole(module):
        if _numel(module) <= limit:
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
    """Whether ``module`` has units in it that are alike."""
    alike = {each for outer in module.modules() for each in _alike(outer)}
    return any(id(each) in alike and _is_whole(each) for each in module.modules())


def _is_whole(module: nn.Module) -> bool:
    """Whether ``module`` is called, and has sharded parameters in several modules."""
    if type(module).forward is nn.Module.forward:
        return False
    owners = [each for each in module.modules() if any(map(zero3.is_sharded, each._parameters.values()))]
    return len(owners) > 1


def _is_held(param: Any) -> bool:
    return bool(param._zerosync_record.hold)  # gathered in buckets of its own (held_modules.py)


def _numel(module: nn.Module) -> int:
    return sum(map(zero3.full_numel, filter(zero3.is_sharded, module.parameters())))


def _nbytes(module: nn.Module) -> int:
    return sum(map(zero3.full_bytes, filter(zero3.is_sharded, module.parameters())))
