"""When modules ran in the forward: what a ZeRO-3 backward has behind it, alike on all ranks.

Reductions and gathers of one process group share one order of calls, on every rank the same (U1). Which gradients a
backward has completed is no measure for it: a rank may use a parameter that another does not, such as an expert
without tokens. Which modules have run is, because their gathers have to agree in any case (W4).

Autograd runs the nodes of a graph in the reverse of the order in which they were made. So when it comes to a call of a
module, all that forwards began after that call had ended is done, in this graph, on every rank. A parameter that was
used there for the first time has its gradient, or gets none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from zerosync_strategy.core.engine.interpose import replaced

END = 2**62
"""After all calls: nothing is behind a backward that comes from there."""
LONGEST = 2**17
"""Calls that are noted down at most, where forwards with gradients go on without a backward, as in an evaluation. The
count then begins anew, on all ranks alike; what is reduced too early for it is reduced once more at the close (W4)."""


class ModuleOrder:
    """Counts the calls of modules since the last backward began.

    What runs inside a backward, as the recomputation of checkpointed activations, does not count: the graph is that of
    the forward. ``parameters_of`` returns the parameters that are gathered for a module.
    """

    def __init__(self, parameters_of: Callable[[Any], list[Any]]) -> None:
        self._parameters_of = parameters_of
        self._calls = 0
        self._began: dict[Any, int] = {}  # by module, its first call
        self._ended: dict[Any, list[int]] = {}  # by module, the number of calls that had begun at each end of one
        self._read: dict[Any, int] = {}  # by parameter that something else than its module has read
        self._is_over = False  # the next call belongs to another graph
        self._counts = True
        # In the running backward:
        self._last: Any = None  # the module to which it came last
        self._come: Counter[Any] = Counter()  # the calls of each module to which it has come

    def forward(self) -> AbstractContextManager[None]:
        """Around a forward of the model. Without gradients it is part of no graph."""
        return replaced(self, "_counts", self._counts and torch.is_grad_enabled())

    @property
    def _notes_forwards(self) -> bool:
        return self._counts and torch._C._current_graph_task_id() == -1

    def begins(self, module: Any) -> None:
        if self._notes_forwards:
            if self._is_over or self._calls == LONGEST:
                self._calls, self._is_over = 0, False
                for of_last in (self._began, self._ended, self._read):
                    of_last.clear()
            self._calls += 1
            self._began.setdefault(module, self._calls)

    def ends(self, module: Any) -> None:
        if self._notes_forwards:
            self._ended.setdefault(module, []).append(self._calls)

    def reads(self, param: Any) -> None:
        """``param`` is read outside of the modules for which it is gathered."""
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
        for module, number in self._began.items():
            for param in self._parameters_of(module):
                first[id(param)] = min(number, first.get(id(param), END))
        return first

    def comes_to(self, module: Any) -> int:
        """The backward comes to a call of ``module``. What was used first after the returned number is behind it."""
        ends = self._ended.get(module)
        if not ends:
            return END
        if module is not self._last:  # else to another output of that call
            self._last = module
            self._come[module] += 1
        return ends[-min(self._come[module], len(ends))]
