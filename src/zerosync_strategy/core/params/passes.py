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

    Distances are in elements of other units. ``again``: from each to the next call of the same; ``end``: to the end.
    ``next``: the pass that has followed this one.
    """

    def __init__(self, units: list[Unit]) -> None:
        self.units = units
        self.next: Pass | None = None
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


class Passes:
    """What units are expected to come, in the passes of one kind.

    Those of the pass that has followed the last one before; if it began otherwise, of the last that began alike.
    """

    def __init__(self) -> None:
        self._known: list[Pass] = []  # the last one first
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
            following = self._known[0].next if self._known else None
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

    def over(self) -> None:
        """A pass has ended."""
        if not self._now:
            return
        this = next((known for known in self._known if known.units == self._now), None) or Pass(self._now)
        if self._known:
            self._known[0].next = this
        self._known = [this, *(known for known in self._known if known is not this)][:REMEMBERED]
        self._expected, self._now, self._place = None, [], {}
