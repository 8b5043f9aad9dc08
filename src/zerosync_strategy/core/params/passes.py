"""ZeRO-3: the order in which units come in forwards and in backwards, and so what is expected to follow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from zerosync_strategy.core.params import unit_order
from zerosync_strategy.core.params.units import Unit

INFINITE = float("inf")
_UNEXPECTED = INFINITE, INFINITE
REMEMBERED = 4
"""Passes of each kind, as of two networks that train each other, and of an evaluation."""


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
        return repeats or len(self._now) >= unit_order.LONGEST

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
