"""ZeRO-3: what a rank gathers, in words, and the log and digest that find ranks that gather differently (W4).

Where gathers can have a tag, the digest is the tag, so gathers that differ do not match. Elsewhere the ranks of a group
compare digests in each optimizer step, by one message of 16 bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import all_reduce, gather_objects, note_launch
from zerosync_strategy.core.comm.streams import HostCopy, Streams
from zerosync_strategy.core.comm.traffic import SentCounter
from zerosync_strategy.core.engine.zero import listed
from zerosync_strategy.core.failures.doing import Cause, Departure, Doing
from zerosync_strategy.core.failures.errors import RankError

_Gathers = list[tuple[int, ...]]  # ids of parameters, by gather


class GatherActivity(NamedTuple):
    """What a rank does that gathers the parameters with these ids. Holds no engine: it is kept for a while."""

    names: Mapping[int, str]
    ids: tuple[int, ...]
    ranks: str
    reader: str = ""

    @property
    def doing(self) -> Doing:
        return Doing.GATHER

    @property
    def module(self) -> str:
        """The module that has the first parameter."""
        return self.names.get(self.ids[0], "").rpartition(".")[0]

    def __str__(self) -> str:
        reader = f" for {self.reader}" if self.reader else ""
        return f"the gather of {_listed(self.names, self.ids)} over the ranks {self.ranks}{reader}"


class GatherDigest:
    """The log and digest of this rank's gathers over one process group of several ranks since the last step.

    ``tagged``: gathers of different parameters do not match. ``device``: on which the group communicates.
    """

    def __init__(self, process_group: Any, tagged: bool, device: torch.device, streams: Streams) -> None:
        self.process_group = process_group
        self.tagged = tagged
        self._streams = streams
        self._gathers: _Gathers = []
        self._before: _Gathers = []  # in the last window
        self._step = self._digest = 0
        # Made once: with a tensor from a list, or new pinned memory, the host would wait for the device.
        self._extremes = torch.zeros(2, dtype=torch.int64, device=device)
        self._answer = HostCopy(streams, 2)
        self._unread: tuple[int, _Gathers] | None = None  # the digest and the log that were compared

    def add(self, ids: tuple[int, ...], digested: bytes) -> int:
        """Add a gather of the parameters with these ids, also given as bytes; return a tag of 31 bits.

        Its highest bit is set. Ranks of the group get the same tag if all their gathers since the last step are the
        same.
        """
        self._gathers += (ids,)
        self._digest = zlib.crc32(digested, self._digest)
        return 2**30 | self._digest % 2**30

    def compare_window(self, names: Mapping[int, str], counter: SentCounter) -> None:
        """Before a step, compare digests over the ranks, unless gathers have tags, and start a new log. Collective.

        On a device with streams, the host does not wait for the result but reads it in the next call. If digests
        differ, every rank of the group raises a ``RankError`` with the first gather that differs.
        """
        self.check(names)
        if not self.tagged:
            self._compare(counter)
        self._step += 1
        self._before, self._gathers, self._digest = self._gathers, [], self._step
        if not self._streams.concurrent:
            self.check(names)

    def departure(self, names: Mapping[int, str]) -> Departure | None:
        """Return how the gathers of this window differ from the last window; ``None`` if they do not."""
        for now, then in zip(self._gathers, self._before, strict=False):
            if now != then:
                text = f"gathered {_listed(names, now)} where it gathered {_listed(names, then)} in the window before"
                return Departure(Cause.OTHER_MODULES, text)
        return None

    def _compare(self, counter: SentCounter) -> None:
        for element, value in zip(self._extremes, (self._digest, -self._digest), strict=True):
            element.fill_(value)
        work = all_reduce(self._extremes, self.process_group, counter, dist.ReduceOp.MAX, async_op=True)
        note_launch(self.process_group, self._extremes.device, "the comparison of what ranks have gathered")
        work.wait()
        self._answer.begin(self._extremes)
        self._unread = self._digest, self._gathers

    def check(self, names: Mapping[int, str]) -> None:
        """Read the result of the last :meth:`compare_window`, once. If digests differ: collective, and raises."""
        if self._unread is None:
            return
        (digest, gathers), self._unread = self._unread, None
        if self._answer.read() == [digest, -digest]:
            return
        by_turn = enumerate(zip_longest(*gather_objects(gathers, self.process_group)), start=1)
        turn, by_rank = next((turn, by_rank) for turn, by_rank in by_turn if len(set(by_rank)) > 1)
        found = "\n".join(
            f"  rank {dist.get_global_rank(self.process_group, rank)}: "
            + (_listed(names, ids, len(ids)) if ids else "had gathered all that it wanted")
            for rank, ids in enumerate(by_rank)
        )
        raise RankError(
            f"Ranks gathered different parameters between two optimizer steps; in gather {turn}:\n{found}\nUnder"
            " ZeRO-3 all ranks must run the same modules in the same order, unless all parameters are held"
            " (param_memory_budget='all'). What they have computed since is wrong: go back to the last checkpoint."
        )


def _listed(names: Mapping[int, str], ids: Sequence[int], shown: int = 3) -> str:
    return listed([repr(names.get(param_id, f"parameter {param_id}")) for param_id in ids], shown)
