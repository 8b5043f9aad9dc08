"""ZeRO-3: copies of parameters that stay where they need not be gathered from, or not from far away.

A copy holds until the parameter's shards are written, by whomever: each write is counted (``Record.writes``), alike on
all ranks. So what has a copy is known on all of them without a message. An optimizer step ends what it changes; a copy
of a parameter that no optimizer trains serves for the whole run (R4).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from zerosync_strategy.core.engine import zero3

Values = TypeVar("Values")


@dataclass
class _Copy(Generic[Values]):
    """The memory of one parameter's copy, of ``nbytes`` bytes.

    ``writes``: to the parameter's shards before it was made; ``None``: it has no values.
    """

    values: Values
    nbytes: int
    writes: int | None = None


class Copies(ABC, Generic[Values]):
    """Copies of one kind of the parameters of one engine.

    Attributes:
        limit: bytes of the memory of all copies; ``None``: no limit.
        chosen: the parameters to keep; ``None`` while it is unknown which are gathered more than once: whatever comes
            first and fits.
        now, peak_bytes: bytes of copies, and the most at once since the last :meth:`reset_counts`.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._copies: dict[Any, _Copy[Values]] = {}
        self.now = self.peak_bytes = 0
        self._at_begin: dict[Any, int | None] = {}  # what had a copy when the window began
        self.chosen: set[Any] | None = None

    def may_have(self, param: Any) -> bool:
        return True

    @abstractmethod
    def bytes_of(self, param: Any) -> int:
        """Return the bytes of the memory of a copy of ``param``."""

    @abstractmethod
    def _allocate(self, param: Any) -> Values:
        """Return memory for a copy of ``param``, of :meth:`bytes_of` bytes."""

    @abstractmethod
    def renew(self, param: Any) -> None:
        """Copy the present values of a gathered ``param`` that has a copy, on the current stream."""

    def get(self, param: Any) -> Values | None:
        copy = self._copies.get(param)
        return copy.values if copy is not None and copy.writes == param._zerosync_record.writes else None

    def all_values(self) -> list[Values]:
        return [copy.values for copy in self._copies.values()]

    def keeps(self, param: Any) -> bool:
        """Return whether ``param`` is copied once in a window, and then taken from here."""
        return param in (self._copies if self.chosen is None else self.chosen)

    def was_there(self, param: Any) -> bool:
        """Return whether the values that ``param`` has now were here when the window began."""
        return param in self._at_begin and self._at_begin[param] == param._zerosync_record.writes

    def to_fill(self, param: Any) -> Values | None:
        """Return the memory for the values of ``param``, just gathered, which are here from now on.

        ``None``: none is needed, wanted, or left.
        """
        is_wanted = not zero3.is_persistent(param) if self.chosen is None else param in self.chosen
        if not is_wanted or self.get(param) is not None:
            return None
        copy = self._copies.get(param)
        if copy is None:
            nbytes = self.bytes_of(param)
            if self.limit is not None and self.now + nbytes > self.limit:
                return None
            copy = self._copies[param] = _Copy(self._allocate(param), nbytes)
            self.now += nbytes
            self.peak_bytes = max(self.peak_bytes, self.now)
        copy.writes = param._zerosync_record.writes
        return copy.values

    def choose(self, params: set[Any], leaving: Iterable[Any]) -> None:
        """Keep ``params`` from here on, and beside them what fits of ``leaving``, until the device holds it."""
        self.chosen = params
        room = None if self.limit is None else self.limit - sum(map(self.bytes_of, params))
        stays = params.union(fitting(leaving, room, self.bytes_of))
        self.free(param for param in list(self._copies) if param not in stays)
        self.peak_bytes = self.now  # of the coming window

    def free(self, params: Iterable[Any]) -> None:
        for param in params:
            if (copy := self._copies.pop(param, None)) is not None:
                self.now -= copy.nbytes

    def reset_counts(self) -> None:
        self.peak_bytes = self.now
        self._at_begin = {param: copy.writes for param, copy in self._copies.items() if self.get(param) is not None}


def fitting(params: Iterable[Any], room: int | None, bytes_of: Callable[[Any], int] = zero3.full_bytes) -> list[Any]:
    """Return those of ``params``, the first first, that fit into ``room`` bytes; ``None``: all."""
    chosen = []
    for param in params:
        nbytes = bytes_of(param)
        if room is None or nbytes <= room:
            chosen.append(param)
            room = None if room is None else room - nbytes
    return chosen
