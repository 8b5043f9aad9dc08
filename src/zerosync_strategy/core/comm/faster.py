"""Which of two ways to gather is faster: both are timed in turns, and all ranks choose alike."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

MEASURED = 7
"""Turns of a measurement, coded and in full; the last one, a coded one, tells all ranks what each has measured."""
MORE = 6
"""Turns that it goes on for where the two are close."""
MOST = MEASURED + 2 * MORE
CLOSE = 0.03
"""Part of the time of full gathers within which they are close. If they still are in the end, gathers stay full."""
MEASURE_EVERY = 512
"""Turns after which it measures again."""


class FasterWay:
    """Says for each turn, the time of one step, whether gathers are to be coded.

    Args:
        automatic: keep the faster way; else gathers are always to be coded.
    """

    def __init__(self, automatic: bool) -> None:
        self._automatic = automatic
        self.reset()

    def reset(self) -> None:
        """Begin anew with a turn that has no choice: nothing can be coded in it. On all ranks alike."""
        self._turn = 0
        self._until = MEASURED
        self._coded_is_faster = True
        self._times: dict[bool, list[float]] = {True: [], False: []}

    @property
    def measures(self) -> bool:
        """Whether this turn is timed."""
        return self._automatic and 0 < self._turn <= self._until

    @property
    def codes(self) -> bool:
        """Whether gathers of this turn are to be coded."""
        return self._turn % 2 == 1 if self.measures else self._coded_is_faster

    def own_times(self) -> list[int]:
        """Return what this rank has measured, in microseconds: of turns that were coded, and in full."""
        return [int(1e6 * median(self._times[coded] or [0.0])) for coded in (True, False)]

    def end_turn(self, seconds: float, of_all: Sequence[int] | None) -> bool:
        """Go on to the next turn; return whether measurements begin again with that.

        Args:
            seconds: that this one took.
            of_all: :meth:`own_times` of all ranks, made one in a way that is the same on all; ``None``: unknown.
        """
        if self.measures:
            self._times[self.codes].append(seconds)
            if self._turn == self._until:
                self._choose(of_all)
        self._turn += 1
        if not self._automatic or self._turn <= MEASURE_EVERY:
            return False
        self._turn, self._until = 0, MEASURED
        return True

    def _choose(self, of_all: Sequence[int] | None) -> None:
        if of_all is not None:
            coded, full = of_all
            if abs(coded - full) <= CLOSE * full and self._until < MOST:
                self._until += MORE
                return
            self._coded_is_faster = coded < (1 - CLOSE) * full
        self._times = {True: [], False: []}
