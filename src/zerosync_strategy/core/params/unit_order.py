"""The order of ZeRO-3's units: which are expected next, and which parameters a backward has passed, alike on all ranks.

Reductions and gathers of one process group are issued in one order, the same on every rank (U1). That order cannot
depend on which gradients a backward has completed: a rank may use a parameter that another does not, such as an expert
without tokens. It can depend on which units have run, because their gathers must agree anyway (W4).

Autograd runs the nodes of a graph in the reverse of the order in which they were made. So when a backward reaches a
call of a unit, it has passed everything in this graph that began after that call had ended, on every rank. A parameter
that was first used after that call has its gradient, or gets none.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from zerosync_strategy.core.engine.patches import replaced
from zerosync_strategy.core.engine.types import Zero3Parameter
from zerosync_strategy.core.params.units import Unit

END = 2**62
"""A number larger than that of any call: a backward that has reached only this has passed nothing."""
LONGEST = 2**17
"""The most calls that are counted while forwards with gradients run without a backward, as in an evaluation. Then the
count restarts, on all ranks alike. A gradient that is reduced too early because of this is reduced again at the close
(W4)."""

INFINITE = float("inf")
_UNEXPECTED = INFINITE, INFINITE
REMEMBERED = 4
"""Passes to remember of each kind, as for two networks that train each other and an evaluation."""


class UnitOrder:
    """Counts the calls of units since the last backward began.

    Calls inside a backward, such as recomputed activations, do not count, because the order is that of the forward's
    graph.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._began: dict[Unit, int] = {}  # the first call of each
        self._ended: dict[Unit, list[int]] = {}  # the number of calls that had begun at each end of one
        self._read: dict[Zero3Parameter, int] = {}  # by parameter read outside of its unit
        self._is_over = False  # the next call belongs to another graph
        self._counts = True
        # In the running backward:
        self._last: Unit | None = None  # the unit that it has reached last
        self._come: Counter[Unit] = Counter()  # how many calls of each unit it has reached

    def forward(self) -> AbstractContextManager[None]:
        """Around a forward of the model. A forward without gradients does not count."""
        return replaced(self, "_counts", self._counts and torch.is_grad_enabled())

    def begins(self, unit: Unit) -> None:
        """Count a call, outside of a backward."""
        if not self._counts:
            return
        if self._is_over or self._calls == LONGEST:
            self._calls, self._is_over = 0, False
            for of_last in (self._began, self._ended, self._read):
                of_last.clear()
        self._calls += 1
        if unit not in self._began:
            self._began[unit] = self._calls

    def ends(self, unit: Unit) -> None:
        if self._counts:
            self._ended[unit] = [*self._ended[unit], self._calls] if unit in self._ended else [self._calls]

    def reads(self, param: Zero3Parameter) -> None:
        """Record that ``param`` is read outside of the units that gather it."""
        if self._counts and torch._C._current_graph_task_id() == -1 and not self._is_over:
            self._read.setdefault(param, self._calls)

    # ---- in a backward ---------------------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        self._is_over = True
        self._last = None
        self._come.clear()

    def first_uses(self) -> Mapping[int, int]:
        """Return the number of the call that used each parameter first, by the parameter's ``id``."""
        first = {id(param): number for param, number in self._read.items()}
        for unit, number in self._began.items():
            for param in unit.addresses:
                if param not in first or number < first[param]:
                    first[param] = number
        return first

    def comes_to(self, unit: Unit) -> int:
        """Record that the backward reaches a call of ``unit``; it has passed first uses after the returned number."""
        ends = self._ended.get(unit)
        if not ends:
            return END
        if unit is not self._last:  # else at another output of that call
            self._last = unit
            self._come[unit] += 1
        return ends[-min(self._come[unit], len(ends))]


# ---- passes ------------------------------------------------------------------------------------------------------


class Stay(NamedTuple):
    """The values of an expected unit stay until ``passes.count`` has reached ``until``."""

    passes: Passes
    until: int


class Pass:
    """The units of a forward or a backward, in the order of their calls. Distances are in elements of units.

    Answers are kept, because passes repeat.

    Attributes:
        start: the distance from the start to the first call of each.
        next: the passes that followed, by the pass before; latest last.
    """

    def __init__(self, units: list[Unit]) -> None:
        self.units = units
        self.next: dict[Pass | None, Pass] = {}
        self._before = [0, *itertools.accumulate(unit.numel for unit in units)]  # elements before each position
        self._last = {unit: position for position, unit in enumerate(units)}
        self.start = {unit: self._before[position] for position, unit in reversed([*enumerate(units)])}
        self.distances: dict[tuple[Unit, int], tuple[float, float]] = {}
        self.ahead: list[list[tuple[Unit, bool]] | None] = [None] * len(units)

    def find_distances(self, unit: Unit, position: int) -> tuple[float, float]:
        """Return the distance from ``position`` to the next call of ``unit`` (infinite if none), and to the end."""
        before, again = self._before, INFINITE
        if unit in self._last and self._last[unit] >= position:
            again = before[self.units.index(unit, position)] - before[position]
        found = self.distances[unit, position] = again, before[-1] - before[position]
        return found

    def find_ahead(self, position: int, most: int, live: int) -> list[tuple[Unit, bool]]:
        """Return the units to gather ahead of call ``position``, each with whether half of ``most`` is reached.

        They are of at most ``most`` elements, of which the last may exceed that, and with the unit itself of at most
        ``live``.
        """
        unit, numel, found = self.units[position], 0, []
        for following in itertools.islice(self.units, position + 1, None):
            if following is unit:
                continue
            if numel >= most or unit.numel + numel + following.numel > live:
                break
            numel += following.numel
            found.append((following, numel >= most / 2))
        self.ahead[position] = found
        return found

    def following(self, before: Pass | None) -> Pass | None:
        """Return the pass expected to follow; ``None`` if none has followed yet."""
        return self.next.get(before) or next(reversed(self.next.values()), None)


class Passes:
    """Predicts the calls of units in the passes of one kind.

    It expects the pass that followed the last two passes before. If this pass begins differently, it expects the latest
    pass that began alike.

    Args:
        most: elements to gather ahead.
        live: elements that may be unsharded.

    Attributes:
        count: passes that have ended.
        ahead: what to gather ahead of the call that has come last (:meth:`Pass.find_ahead`).
        stay: until the running pass has ended.
    """

    def __init__(self, most: int, live: int) -> None:
        self._most, self._live = most, live
        self.count = 0
        self.ahead: list[tuple[Unit, bool]] = []
        self.stay = Stay(self, 1)
        self._known: list[Pass] = []  # latest first
        self._before: Pass | None = None  # the pass before the last
        self._following: Pass | None = None  # the pass likely to follow the last
        self._expected: Pass | None = None  # the pass that this one has matched so far
        self._now: list[Unit] = []
        self._position = 0  # how many there are now

    def comes(self, unit: Unit) -> None:
        """Record that ``unit`` is called next."""
        position, expected = self._position, self._expected
        self._now += (unit,)
        self._position += 1
        if expected is None and position:
            return
        if expected is None or expected.units[position : self._position] != [unit]:
            likely = () if self._following is None else (self._following, *self._known)
            expected = next((known for known in likely if known.units[: self._position] == self._now), None)
            self._expected = expected
        if expected is None:
            self.ahead = []
        else:
            found = expected.ahead[position]
            self.ahead = expected.find_ahead(position, self._most, self._live) if found is None else found

    def begins_again(self, unit: Unit) -> bool:
        """Return whether the call of ``unit``, as the outermost module, starts a new pass.

        When a part of the model is called directly, no forward of the model ends the pass, and without gradients no
        backward does either. A pass then ends when its first unit is called again, as in a loop over an encoder or over
        layers. In any case it ends at :data:`LONGEST`.
        """
        repeats = not torch.is_grad_enabled() and self._now[:1] == [unit]
        return repeats or len(self._now) >= LONGEST

    def distances(self, unit: Unit) -> tuple[float, float]:
        """Return the distances from here to the next call of ``unit`` and to the end; infinite if unexpected."""
        expected, key = self._expected, (unit, self._position)
        if expected is None:
            return _UNEXPECTED
        return expected.distances[key] if key in expected.distances else expected.find_distances(*key)

    def start(self, unit: Unit) -> float:
        """Return the distance from the start of the next pass to ``unit``; the running pass is not the next."""
        following = self._following
        if self._now:
            expected = self._expected
            following = None if expected is None else expected.following(self._known[0]) or expected
        return INFINITE if following is None or unit not in following.start else following.start[unit]

    def over(self) -> None:
        """End the pass."""
        if not self._now:
            return
        self.count += 1
        self.stay = Stay(self, self.count + 1)
        this = next((known for known in self._known if known.units == self._now), None) or Pass(self._now)
        if self._known:
            last = self._known[0]
            last.next.pop(self._before, None)
            last.next[self._before] = this
            if len(last.next) > REMEMBERED:
                del last.next[next(iter(last.next))]
            self._before = last
        self._known = [this, *(known for known in self._known if known is not this)][:REMEMBERED]
        self._following = this.following(self._before) or this
        self._expected, self._now, self._position, self.ahead = None, [], 0, []
