"""When units ran in the forward: what a ZeRO-3 backward has behind it, alike on all ranks.

Reductions and gathers of one process group share one order of calls, on every rank the same (U1). Which gradients a
backward has completed is no measure for it: a rank may use a parameter that another does not, such as an expert
without tokens. Which units have run is, because their gathers have to agree in any case (W4).

Autograd runs the nodes of a graph in the reverse of the order in which they were made. So when it comes to a call of a
unit, all that forwards began after that call had ended is done, in this graph, on every rank. A parameter that was
used there for the first time has its gradient, or gets none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from zerosync_strategy.core.engine.interpose import replaced
from zerosync_strategy.core.params.units import Unit

END = 2**62
"""After all calls: nothing is behind a backward that comes from there."""
LONGEST = 2**17
"""Calls that are noted down at most, where forwards with gradients go on without a backward, as in an evaluation. The
count then begins anew, on all ranks alike; what is reduced too early for it is reduced once more at the close (W4)."""


class UnitOrder:
    """Counts the calls of units since the last backward began.

    What runs inside a backward, as the recomputation of checkpointed activations, does not count: the graph is that of
    the forward.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._began: dict[Unit, int] = {}  # the first call of each
        self._ended: dict[Unit, list[int]] = {}  # the number of calls that had begun at each end of one
        self._read: dict[Any, int] = {}  # by parameter that something else than its unit has read
        self._is_over = False  # the next call belongs to another graph
        self._counts = True
        # In the running backward:
        self._last: Unit | None = None  # the unit to which it came last
        self._come: Counter[Unit] = Counter()  # the calls of each unit to which it has come

    def forward(self) -> AbstractContextManager[None]:
        """Around a forward of the model. Without gradients it is part of no graph."""
        return replaced(self, "_counts", self._counts and torch.is_grad_enabled())

    @property
    def _notes_forwards(self) -> bool:
        return self._counts and torch._C._current_graph_task_id() == -1

    def begins(self, unit: Unit) -> None:
        """A call of ``unit`` begins."""
        if not self._notes_forwards:
            return
        if self._is_over or self._calls == LONGEST:
            self._calls, self._is_over = 0, False
            for of_last in (self._began, self._ended, self._read):
                of_last.clear()
        self._calls += 1
        self._began.setdefault(unit, self._calls)

    def ends(self, unit: Unit) -> None:
        if self._notes_forwards:
            self._ended.setdefault(unit, []).append(self._calls)

    def reads(self, param: Any) -> None:
        """``param`` is read outside of the units for which it is gathered."""
        if self._notes_forwards and not self._is_over:
            self._read.setdefault(param, self._calls)

    # ---- in a backward ---------------------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        """The forwards are over."""
        self._is_over = True
        self._last = None
        self._come.clear()

    def first_uses(self) -> Mapping[int, int]:
        """Return when each parameter was used first, by its ``id``."""
        first = {id(param): number for param, number in self._read.items()}
        for unit, number in self._began.items():
            for param in unit.params:
                first[id(param)] = min(number, first.get(id(param), END))
        return first

    def comes_to(self, unit: Unit) -> int:
        """The backward comes to a call of ``unit``. What was used first after the returned number is behind it."""
        ends = self._ended.get(unit)
        if not ends:
            return END
        if unit is not self._last:  # else to another output of that call
            self._last = unit
            self._come[unit] += 1
        return ends[-min(self._come[unit], len(ends))]
