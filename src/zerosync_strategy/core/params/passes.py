"""ZeRO-3: the order in which units come in forwards and in backwards, and so what is expected to follow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from zerosync_strategy.core.params.units import Unit

INFINITE = float("inf")
REMEMBERED = 4
"""Passes of each kind, as of two networks that train each other, and of an evaluation."""


class Pass:
    """Units in the order in which they came, in a forward or a backward.

    Distances are in elements of other units. ``again``: from each to the next call of the same; ``end``: to the end;
    ``start``: from the start to the first call of a unit.
    """

    def __init__(self, units: list[Unit]) -> None:
        self.units = units
        self._next: dict[Pass | None, Pass] = {}  # what has followed this one, by the pass before, the last one last
        self.start: dict[Unit, float] = {}
        numel = 0
        for unit in units:
            self.start.setdefault(unit, numel)
            numel += unit.numel
        self.again: list[float] = []
        self.end: list[float] = []
        far: dict[Unit, int] = {}
        numel = 0
        for unit in reversed(units):
            self.again.append(numel - far[unit] if unit in far else INFINITE)
            self.end.append(numel)
            numel += unit.numel
            far[unit] = numel
        self.again.reverse()
        self.end.reverse()

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
        self._expected: Pass | None = None
        self._now: list[Unit] = []
        self._place: dict[Unit, int] = {}  # where each came last

    def comes(self, unit: Unit) -> None:
        place = self._place[unit] = len(self._now)
        self._now.append(unit)
        expected = self._expected
        if expected is None and place:
            return
        if expected is None or place >= len(expected.units) or expected.units[place] is not unit:
            following = self._known[0].following(self._before) if self._known else None
            likely = [*self._known] if following is None else [following, *self._known]
            self._expected = next((known for known in likely if known.units[: place + 1] == self._now), None)

    def ahead(self) -> Iterator[Unit]:
        """Yield what is expected to follow."""
        if self._expected is not None:
            yield from itertools.islice(self._expected.units, len(self._now), None)

    def distances(self, unit: Unit) -> tuple[float, float]:
        """Return the distance from the last call of ``unit`` to its next, and to the end; infinite if unexpected."""
        place = self._place.get(unit)
        if place is None or self._expected is None:
            return INFINITE, INFINITE
        return self._expected.again[place], self._expected.end[place]

    def start(self, unit: Unit) -> float:
        """Return the distance from the start of the next pass to ``unit``; of the one after this, if one runs."""
        last, before = (self._known[0] if self._known else None), self._before
        if self._now:
            last, before = self._expected, last
        return INFINITE if last is None else (last.following(before) or last).start.get(unit, INFINITE)

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
        self._expected, self._now, self._place = None, [], {}
