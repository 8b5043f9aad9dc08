"""The order of ZeRO-3's units: what is expected to follow, and what a backward has behind it, alike on all ranks.

Reductions and gathers of one process group share one order of calls, on every rank the same (U1). Which gradients a
backward has completed is no measure for it: a rank may use a parameter that another does not, such as an expert
without tokens. Which units have run is, because their gathers have to agree in any case (W4).

Autograd runs the nodes of a graph in the reverse of the order in which they were made. So when it comes to a call of a
unit, all that forwards began after that call had ended is done, in this graph, on every rank. A parameter that was
used there for the first time has its gradient, or gets none.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
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

INFINITE = float("inf")
_UNEXPECTED = INFINITE, INFINITE
REMEMBERED = 4
"""Passes of each kind, as of two networks that train each other, and of an evaluation."""


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


# ---- passes ------------------------------------------------------------------------------------------------------


class Pass:
    """Units in the order in which they came, in a forward or a backward. Distances are in elements of units.

    ``start``: from the start to the first call of each.
    """

    def __init__(self, units: list[Unit]) -> None:
        self.units = units
        self._next: dict[Pass | None, Pass] = {}  # what has followed this one, by the pass before, the last one last
        self._before = [0, *itertools.accumulate(unit.numel for unit in units)]  # elements that came, by place
        self._last = {unit: place for place, unit in enumerate(units)}
        self.start = {unit: self._before[place] for place, unit in reversed([*enumerate(units)])}

    def distances(self, unit: Unit, place: int) -> tuple[float, float]:
        """Return the distance from ``place`` to the next call of ``unit`` (infinite: none), and to the end."""
        before, again = self._before, INFINITE
        if unit in self._last and self._last[unit] >= place:
            again = before[self.units.index(unit, place)] - before[place]
        return again, before[-1] - before[place]

    def followed(self, by: Pass, before: Pass | None) -> None:
        """``by`` has followed this one, and ``before`` was the one before."""
        self._next.pop(before, None)
        self._next[before] = by
        if len(self._next) > REMEMBERED:
            del self._next[next(iter(self._next))]

    def following(self, before: Pass | None) -> Pass | None:
        """What is expected to follow; ``None``: nothing has."""
        return self._next.get(before) or next(reversed(self._next.values()), None)


class Passes:
    """What units are expected to come, in the passes of one kind.

    Those of the pass that has followed the last two before; if it began otherwise, of the last that began alike.

    Attributes:
        count: of passes that have ended.
    """

    def __init__(self) -> None:
        self.count = 0
        self._known: list[Pass] = []  # the last one first
        self._before: Pass | None = None  # the one before the last
        self._following: Pass | None = None  # what is likely to follow the last
        self._expected: Pass | None = None  # and what this one is, until it comes otherwise
        self._now: list[Unit] = []

    def comes(self, unit: Unit) -> None:
        place = len(self._now)
        self._now.append(unit)
        expected = self._expected
        if expected is None and place:
            return
        if expected is None or place >= len(expected.units) or expected.units[place] is not unit:
            likely = () if self._following is None else (self._following, *self._known)
            self._expected = next((known for known in likely if known.units[: place + 1] == self._now), None)

    def begins_again(self, unit: Unit) -> bool:
        """Return whether a part that begins with ``unit``, and is called itself, is to begin a new pass.

        No forward of the model ends this one. Without gradients no backward does either: the unit with which it began
        comes again, as in a loop over an encoder or over layers. In any case it ends at :data:`LONGEST`.
        """
        repeats = not torch.is_grad_enabled() and self._now[:1] == [unit]
        return repeats or len(self._now) >= LONGEST

    def ahead(self) -> Iterator[Unit]:
        """Yield what is expected to follow."""
        if self._expected is not None:
            yield from itertools.islice(self._expected.units, len(self._now), None)

    def distances(self, unit: Unit) -> tuple[float, float]:
        """Return the distance from here to the next call of ``unit``, and to the end; infinite if unexpected."""
        return _UNEXPECTED if self._expected is None else self._expected.distances(unit, len(self._now))

    def start(self, unit: Unit) -> float:
        """Return the distance from the start of the next pass to ``unit``; of the one after this, if one runs."""
        following = self._following
        if self._now:
            expected = self._expected
            following = None if expected is None else expected.following(self._known[0]) or expected
        return INFINITE if following is None or unit not in following.start else following.start[unit]

    def over(self) -> None:
        """A pass has ended."""
        if not self._now:
            return
        self.count += 1
        this = next((known for known in self._known if known.units == self._now), None) or Pass(self._now)
        if self._known:
            self._known[0].followed(this, self._before)
            self._before = self._known[0]
        self._known = [this, *(known for known in self._known if known is not this)][:REMEMBERED]
        self._following = this.following(self._before) or this
        self._expected, self._now = None, []
