"""From what a rank sends to what crosses which link, and to bounds of the step's time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from zerosync_strategy.planning.jobs import Cluster

_PAIRWISE = ("isend", "all_to_all", "all_to_all_single")


@dataclass(frozen=True)
class Crossing:
    """What one rank sends in a step, as a mean over the ranks, and how long the links take for it.

    Attributes:
        within: bytes to ranks of the same node.
        between: bytes to other nodes.
        seconds: of the slower kind of link, of all collectives one after another, latencies included.
    """

    within: float
    between: float
    seconds: float


def crossing(collectives: Mapping[str, tuple[int, int]], cluster: Cluster) -> Crossing:
    """Spread what is sent over the links.

    Collectives go around a ring in the order of the ranks: one rank of each node sends to the next node. What is sent
    point to point, or to all, goes to every other rank alike. A call costs the latency of the slowest link that it
    crosses once for each doubling of the ranks.

    Args:
        collectives: by kind, calls and bytes that one rank sends.
        cluster: where.
    """
    ranks, per_node, links = cluster.ranks, cluster.per_node, cluster.links
    is_one_node = ranks == per_node
    within = between = seconds = 0.0
    for kind, (calls, nbytes) in collectives.items():
        if kind in _PAIRWISE:
            outside = (ranks - per_node) / (ranks - 1)
            egress = nbytes * outside * per_node  # of a node
        else:
            outside = 0.0 if is_one_node else 1 / per_node
            egress = 0.0 if is_one_node else float(nbytes)
        within += nbytes * (1 - outside)
        between += nbytes * outside
        # In a ring the rank that sends to another node is as busy as the others, and no rank waits for two links.
        inside = nbytes * (1 - outside) if kind in _PAIRWISE or is_one_node else float(nbytes)
        inside_seconds = inside / links.within if per_node > 1 else 0.0
        latency = links.latency_within if is_one_node else links.latency_between
        messages = calls / (ranks - 1) if kind == "isend" else calls
        seconds += max(inside_seconds, egress / links.between) + messages * latency * math.ceil(math.log2(ranks))
    return Crossing(within, between, seconds)


@dataclass(frozen=True)
class Bounds:
    """Of the time of one optimizer step, in seconds.

    Attributes:
        lower: all that is sent is hidden behind the computation, or the other way round.
        upper: nothing is.
    """

    lower: float
    upper: float


def bounds(sent: Crossing, compute: float) -> Bounds:
    """Return the bounds for ``compute`` seconds of computation in the step; 0 where it is not known."""
    return Bounds(max(sent.seconds, compute), sent.seconds + compute)
