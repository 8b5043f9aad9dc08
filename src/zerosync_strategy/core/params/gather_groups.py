"""The process groups whose ranks shard parameters of ZeRO-3, in the order in which all ranks gather (U1)."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import backend_for, is_native, new_group
from zerosync_strategy.core.comm.nodes import Nodes, Topology
from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.engine import gathering, zero, zero3
from zerosync_strategy.core.failures.agreement import GatherDigest

MAX_STREAMS = 8
"""The most gather streams of one engine. A rank in more groups shares streams among them (U4)."""


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
        in_place: the backend gathers parameters where they lie.
        stream: the stream on which it gathers (U4); ``None`` on a device without streams.
        is_tagged: gathers of different parameters do not match.
    """

    process_group: Any
    communicator: Any
    place: int
    ranks: str
    digest: GatherDigest | None
    nodes: Nodes | None
    is_nccl: bool
    in_place: bool
    stream: Any

    def __post_init__(self) -> None:
        self.is_tagged = self.digest is not None and self.digest.tagged

    def close(self) -> None:
        """Destroy what was made for the gathers."""
        if self.communicator is not self.process_group:
            with suppress(ValueError, AssertionError):  # the program has destroyed all process groups
                dist.destroy_process_group(self.communicator)


def gather_groups(engine: Any, topology: Topology, streams: Streams, separate: bool) -> dict[Any, GatherGroup]:
    """Return the groups of the engine's parameters, by process group, in the order of gathers.

    ``separate``: on NCCL, each gathers over a communicator without reductions. Collective then.
    """
    by_all_reduce = gathering.config_of(engine).use_all_reduce_for_fetch_params  # sums each rank's shard and zeros
    # Two groups of the same ranks keep the order of their parameters.
    process_groups = dict.fromkeys(map(zero3.process_group, sorted(engine.module.parameters(), key=zero3.param_id)))
    count, overlaps = min(len(process_groups), MAX_STREAMS), gathering.config_of(engine).overlap_comm
    made = streams.make_gather_streams(count, overlaps)
    is_plain = zero.is_plain(zero.comm_backend())
    groups: dict[Any, GatherGroup] = {}
    for place, group in enumerate(sorted(process_groups, key=_place)):
        tagged = not (by_all_reduce or is_native(group, engine.device))
        digest = GatherDigest(group, tagged, engine.device, streams) if dist.get_world_size(group) > 1 else None
        nodes = topology.of(group) if digest is not None else None
        is_nccl = backend_for(group, engine.device.type) == "nccl"
        stream, members = made[place % len(made)], dist.get_process_group_ranks(group)
        makes = separate and is_nccl and digest is not None
        communicator = new_group(members, group, engine.device, is_first=True) if makes else group
        of_group = str(members), digest, nodes, is_nccl, is_plain and not tagged, stream
        groups[group] = GatherGroup(group, communicator, place, *of_group)
    return groups


def _place(process_group: Any) -> tuple[Any, ...]:
    """Return the sort key of a group: larger groups first, and all rows of a mesh before or after all its columns."""
    ranks = dist.get_process_group_ranks(process_group)
    return -len(ranks), [rank - ranks[0] for rank in ranks], ranks
