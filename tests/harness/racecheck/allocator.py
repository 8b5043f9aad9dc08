"""How much memory an allocator with streams takes, as PyTorch's caching one does, where the host runs far ahead.

A block that is freed can be given out again on its stream at once. One that was recorded on another stream
(``record_stream``) cannot, until the host has seen that stream come so far; a host that waits for nothing never has.
"""

from __future__ import annotations

from tests.harness.racecheck.checker import Block, Clock, Timeline


class Allocator:
    """Counts bytes that are in use, or cannot be given out again.

    Attributes:
        peak: the most since it was set to :attr:`taken`.
    """

    def __init__(self, host: Timeline) -> None:
        self._host = host
        self._live: dict[int, int] = {}  # bytes, by id of the block
        self._deferred: list[tuple[Clock, int]] = []  # what must be complete before so many bytes are given out
        self.peak = 0

    @property
    def taken(self) -> int:
        self._deferred = [each for each in self._deferred if not self._host.clock.knows(each[0])]
        return sum(self._live.values()) + sum(nbytes for _, nbytes in self._deferred)

    def allocate(self, block: Block) -> None:
        self._live[id(block)] = block.nbytes
        self.peak = max(self.peak, self.taken)

    def free(self, block: Block) -> None:
        """Nothing for a block that was there before."""
        nbytes = self._live.pop(id(block), 0)
        others = [timeline for timeline in block.recorded if timeline is not block.timeline]
        uses = Clock({timeline.id: timeline.clock.get(timeline.id, 0) for timeline in others})
        if nbytes and not self._host.clock.knows(uses):
            self._deferred.append((uses, nbytes))
