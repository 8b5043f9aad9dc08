"""The process groups whose ranks share parameters of ZeRO-3, in the order in which all ranks gather (U1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import backend_for, is_native
from zerosync_strategy.core.comm.nodes import Nodes, Topology
from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.engine import gathering, zero3
from zerosync_strategy.core.params.digest import GatherDigest
from zerosync_strategy.core.params.shard_over import ranks_of

MAX_STREAMS = 8
"""Gather streams of one engine. A rank in more groups than that lets some share a stream (U4)."""


@dataclass(eq=False)
class GatherGroup:
    """A process group whose ranks share parameters.

    Attributes:
        place: in the order of gathers (U1).
        ranks: for errors.
        digest: of what it has gathered; ``None`` for one rank, which gathers nothing.
        nodes: that its messages go between and within; ``None``: in one level.
        is_nccl: torch's flight recorder has its gathers.
        stream: on which it gathers (U4); ``None`` on a device without streams.
    """

    process_group: Any
    place: int
    ranks: str
    digest: GatherDigest | None
    nodes: Nodes | None
    is_nccl: bool
    stream: Any = None

    @property
    def is_tagged(self) -> bool:
        """Whether gathers of different parameters do not meet."""
        return self.digest is not None and self.digest.tagged


def gather_groups(engine: Any, topology: Topology, streams: Streams) -> dict[Any, GatherGroup]:
    """Return the groups of the engine's parameters, by process group, in the order of gathers."""
    by_all_reduce = gathering.gathers_by_all_reduce(engine)
    # Two groups of the same ranks stay in the order of their parameters.
    process_groups = dict.fromkeys(map(zero3.process_group, sorted(engine.module.parameters(), key=zero3.param_id)))
    groups: dict[Any, GatherGroup] = {}
    for place, group in enumerate(sorted(process_groups, key=lambda group: _place(ranks_of(group)))):
        tagged = not (by_all_reduce or is_native(group, engine.device))
        digest = GatherDigest(group, tagged, engine.device, streams) if dist.get_world_size(group) > 1 else None
        nodes = topology.of(group) if digest is not None else None
        is_nccl = backend_for(group, engine.device.type) == "nccl"
        groups[group] = GatherGroup(group, place, str(list(ranks_of(group))), digest, nodes, is_nccl)
    return groups


def _place(ranks: tuple[int, ...]) -> tuple[Any, ...]:
    """Where a group comes in the order: larger ones first, and all rows of a mesh before all its columns, or after."""
    return -len(ranks), [rank - ranks[0] for rank in ranks], ranks
