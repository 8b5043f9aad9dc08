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
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from typing import Any

from torch import nn

from zerosync_strategy.core.engine import gathering, zero3
from zerosync_strategy.core.engine.parameter import Record
from zerosync_strategy.core.engine.parameter_states import MODULE
from zerosync_strategy.core.engine.transformers import not_split

RUNS = "_zerosync_runs"  # in the __dict__ of a module with parameters: whether a forward that uses them runs


class Unit:
    """A module whose parameters are gathered together, and those.

    Attributes:
        params: in the order of gathers; empty for a model that has all of them in units inside of it.
        runs: how many of its forwards run.
        tasks: backwards, by autograd's number of each, that have come to it and not left it.
        is_claimed: its values stay for one of these, or for what its hooks expect (``unit_hooks.py``).
        held: the runs in which it is gathered, where all of it is held until the step; ``None``: it is not.
        pending: it has not waited for them in this window, or they may not be there on every stream.
    """

    def __init__(self, module: nn.Module, params: Iterable[Any], is_whole: bool) -> None:
        self.module = module
        self._marks = [vars(each) for each in (module.modules() if is_whole else [module]) if vars(each)["_parameters"]]
        self.params = sorted(params, key=zero3.param_id)
        self.numel = sum(map(zero3.full_numel, self.params))
        self.runs = 0
        self.is_claimed = False
        self.tasks: set[int] = set()
        self.held: list[Any] | None = None
        self.pending = True
        self._mark(False)

    def __deepcopy__(self, memo: Any) -> Unit:
        return self  # of a copied module (unit_hooks.py)

    @cached_property
    def records(self) -> list[Record]:
        return [param._zerosync_record for param in self.params]

    def claim(self) -> None:
        """The current stream has waited for the values, which stay until :meth:`let_go`."""
        if self.is_claimed:
            return
        self.is_claimed = True
        for record in self.records:
            record.users += 1
            record.bits |= MODULE
            if record.watched and record.users == 1:
                record.writes_at_use = record.writes
            record.param.__class__ = record.own_class

    def begin(self) -> None:
        """One of its forwards begins."""
        self.runs += 1
        if self.runs == 1:
            self._mark(True)
        for record in self.records:
            record.runs += 1

    def end(self) -> None:
        """One of its forwards has ended."""
        self.runs -= 1
        if not self.runs:
            self._mark(False)
        for record in self.records:
            record.runs -= 1

    def _mark(self, runs: bool) -> None:
        for attributes in self._marks:
            attributes[RUNS] = runs

    def unmark(self) -> None:
        """Leave nothing on the modules."""
        for attributes in self._marks:
            attributes.pop(RUNS, None)

    def let_go(self) -> list[Record]:
        """Nothing of this unit uses the values any more; return those that no other unit uses either."""
        self.is_claimed = False
        for record in self.records:
            record.users -= 1
        free = [record for record in self.records if not record.users]
        for record in free:
            record.bits &= ~MODULE
        return free


class Units:
    """The units of the module of ``engine``, each a whole or a module with parameters of its own, and the module.

    A ``ValueError``: the module has none of the classes ``names``.

    Attributes:
        every: all of them, outer ones first.
        counts: how many are wholes, by the name of their class.
        most_bytes: of the largest of those.
    """

    def __init__(self, engine: Any, names: Collection[str]) -> None:
        module, config = engine.module, gathering.config_of(engine)
        classes = {type(each).__name__ for each in module.modules()}
        if unknown := [name for name in names if name not in classes]:
            raise ValueError(
                f"ZeroSync option 'unit_modules' got {unknown[0]!r}, and the {type(module).__name__} has no module of"
                f" that class. It has: {', '.join(sorted(classes))}."
            )
        whole = set(names) or not_split(module) & classes
        limit, small = config.max_live_parameters // 2, config.prefetch_bucket_size
        chosen = list(_units(module, whole, limit, small, set()))
        found = [*chosen, *(each for each in module.modules() if gathering.is_leaf(each))]
        self.counts = Counter(type(unit).__name__ for unit in found)
        self.most_bytes = max((_sum(zero3.full_bytes, each) for each in found), default=0)
        self.every = list(_every(module, set(map(id, found))))


def _every(root: nn.Module, wholes: Collection[int]) -> Iterator[Unit]:
    """Yield the units of ``root``: those with the ids ``wholes``, and what has parameters outside of them."""
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
    """Yield the units in ``module``; ``alike``: the ids of modules that have others like them.

    Units have at most ``limit`` elements; up to ``small`` ones, those that are alike may have alike ones in them.
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
    """Whether ``module`` has units in it that are alike."""
    alike = {each for outer in module.modules() for each in _alike(outer)}
    return any(id(each) in alike and _is_whole(each) for each in module.modules())


def _is_whole(module: nn.Module) -> bool:
    """Whether ``module`` is called, and has sharded parameters in several modules."""
    if type(module).forward is nn.Module.forward:
        return False
    owners = [each for each in module.modules() if any(map(zero3.is_sharded, each._parameters.values()))]
    return len(owners) > 1


def _sum(of: Callable[[Any], int], module: nn.Module) -> int:
    return sum(map(of, filter(zero3.is_sharded, module.parameters())))
