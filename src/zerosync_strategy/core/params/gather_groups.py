"""The process groups whose ranks shard parameters of ZeRO-3, in the order in which all ranks gather (U1).

Each group has a log of its gathers and a digest of it, which find ranks that gather different parameters (W4). Where
gathers can have a tag, the digest is the tag, so gathers that differ do not match. Elsewhere the ranks of a group
compare digests before each optimizer step, by one message of 16 bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import backend_for, gather_objects, is_native, new_group, note_launch
from zerosync_strategy.core.comm.nodes import Nodes, Topology
from zerosync_strategy.core.comm.streams import HostCopy, Streams
from zerosync_strategy.core.engine import gathering, zero3
from zerosync_strategy.core.failures.errors import RankError
from zerosync_strategy.core.params.shard_over import ranks_of

MAX_STREAMS = 8
"""The most gather streams of one engine. A rank in more groups shares streams among them (U4)."""


_Gathers = list[tuple[int, ...]]  # ids of parameters, by gather


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
        self._gathers.append(ids)
        self._digest = zlib.crc32(digested, self._digest)
        return 2**30 | self._digest % 2**30

    def compare_window(self, name: Callable[[int], str]) -> None:
        """Before a step, compare digests over the ranks, unless gathers have tags, and start a new log. Collective.

        On a device with streams, the host does not wait for the result but reads it in the next call. If digests
        differ, every rank of the group raises a ``RankError`` with the first gather that differs.
        """
        self.check(name)
        if not self.tagged:
            self._compare()
        self._step += 1
        self._before, self._gathers, self._digest = self._gathers, [], self._step
        if not self._streams.concurrent:
            self.check(name)

    def departure(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the first gather of this window that differs from the last window, and its counterpart."""
        return next(((now, then) for now, then in zip(self._gathers, self._before, strict=False) if now != then), None)

    def _compare(self) -> None:
        from deepspeed import comm

        for element, value in zip(self._extremes, (self._digest, -self._digest), strict=True):
            element.fill_(value)
        work = comm.all_reduce(self._extremes, op=dist.ReduceOp.MAX, group=self.process_group, async_op=True)
        note_launch(self.process_group, self._extremes.device, "the comparison of what ranks have gathered")
        work.wait()
        self._answer.begin(self._extremes)
        self._unread = self._digest, self._gathers

    def check(self, name: Callable[[int], str]) -> None:
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
            + (", ".join(map(name, ids)) if ids else "had gathered all that it wanted")
            for rank, ids in enumerate(by_rank)
        )
        raise RankError(
            f"Ranks gathered different parameters between two optimizer steps; in gather {turn}:\n{found}\nUnder"
            " ZeRO-3 all ranks must run the same modules in the same order, unless all parameters are held"
            " (param_memory_budget='all'). What they have computed since is wrong: go back to the last checkpoint."
        )


@dataclass(eq=False)
class GatherGroup:
    """A process group whose ranks shard parameters.

    Attributes:
        communicator: the process group over which the ranks gather; ``process_group``, or one of the same ranks.
        place: its place in the order of gathers (U1).
        ranks: for errors.
        digest: of its gathers; ``None`` for a group of one rank, which gathers nothing.
        nodes: for gathers in two levels, within and between nodes; ``None``: in one level.
        is_nccl: torch's flight recorder records its gathers.
        stream: the stream on which it gathers (U4); ``None`` on a device without streams.
    """

    process_group: Any
    communicator: Any
    place: int
    ranks: str
    digest: GatherDigest | None
    nodes: Nodes | None
    is_nccl: bool
    stream: Any

    @property
    def is_tagged(self) -> bool:
        """Whether gathers of different parameters do not match."""
        return self.digest is not None and self.digest.tagged

    def close(self) -> None:
        """Destroy what was made for the gathers."""
        if self.communicator is not self.process_group:
            with suppress(ValueError, AssertionError):  # the program has destroyed all process groups
                dist.destroy_process_group(self.communicator)


def gather_groups(engine: Any, topology: Topology, streams: Streams, sharing: str) -> dict[Any, GatherGroup]:
    """Return the groups of the engine's parameters, by process group, in the order of gathers.

    ``sharing``: ``"per_group"``: each gathers on its own stream; ``"shared"``: all on one; ``"own_communicator"``: as
    the first, and on NCCL over a communicator without reductions. Collective then.
    """
    by_all_reduce = gathering.config_of(engine).use_all_reduce_for_fetch_params  # sums each rank's shard and zeros
    # Two groups of the same ranks keep the order of their parameters.
    process_groups = dict.fromkeys(map(zero3.process_group, sorted(engine.module.parameters(), key=zero3.param_id)))
    count = 1 if sharing == "shared" else min(len(process_groups), MAX_STREAMS)
    made = streams.make_gather_streams(count, gathering.config_of(engine).overlap_comm) or [None]
    groups: dict[Any, GatherGroup] = {}
    for place, group in enumerate(sorted(process_groups, key=lambda group: _place(ranks_of(group)))):
        tagged = not (by_all_reduce or is_native(group, engine.device))
        digest = GatherDigest(group, tagged, engine.device, streams) if dist.get_world_size(group) > 1 else None
        nodes = topology.of(group) if digest is not None else None
        is_nccl = backend_for(group, engine.device.type) == "nccl"
        stream, ranks = made[place % len(made)], str(list(ranks_of(group)))
        separate = sharing == "own_communicator" and is_nccl and digest is not None
        communicator = new_group(ranks_of(group), group, engine.device) if separate else group
        groups[group] = GatherGroup(group, communicator, place, ranks, digest, nodes, is_nccl, stream)
    return groups


def _place(ranks: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the sort key of a group: larger groups first, and all rows of a mesh before or after all its columns."""
    return -len(ranks), [rank - ranks[0] for rank in ranks], ranks
