"""From what a rank sends to what crosses which link, and to bounds of the step's time."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerosync_strategy.tools.links import Links
from zerosync_strategy.tools.plan.jobs import Cluster

_PAIRWISE = ("isend", "all_to_all", "all_to_all_single")


@dataclass(frozen=True)
class Span:
    """Seconds: the lower and the upper quartile of what was measured several times; else alike."""

    least: float
    most: float


@dataclass(frozen=True)
class Crossing:
    """What one rank sends in a step, as a mean over the ranks, and how long the links take for it.

    Attributes:
        within, between: bytes to ranks of the same node, and to other nodes.
        seconds: of the slower kind of link; at least for the bytes alone, since the latencies of what is sent at
            once hide one another; at most for all collectives one after another, latencies included.
    """

    within: float
    between: float
    seconds: Span


@dataclass(frozen=True)
class Bounds:
    """Seconds of one optimizer step: all that is sent is hidden behind a rank's own work or the reverse, or nothing."""

    lower: float
    upper: float


def crossing(collectives: Mapping[str, tuple[int, int]], cluster: Cluster) -> Crossing:
    """Spread over the links what one rank sends: by kind of collective, calls and bytes.

    Collectives go around a ring in the order of the ranks: one rank of each node sends to the next node. What is sent
    point to point, or to all, goes to every other rank alike. A call costs the latency of the slowest link that it
    crosses: once point to point, else once for each doubling of the ranks.
    """
    between = sum(nbytes * _outside(kind, cluster) for kind, (_, nbytes) in collectives.items())
    within = sum(nbytes for _, nbytes in collectives.values()) - between
    fast = dataclasses.replace(cluster.links, latency_within=0.0, latency_between=0.0)
    least, most = (_seconds(collectives, cluster, links) for links in (fast, cluster.slow_links or cluster.links))
    return Crossing(within, between, Span(least, most))


def _outside(kind: str, cluster: Cluster) -> float:
    """Return which part of its bytes one rank sends to other nodes, as a mean over the ranks."""
    ranks, per_node = cluster.ranks, cluster.per_node
    if kind in _PAIRWISE:
        return (ranks - per_node) / (ranks - 1)
    return 0.0 if ranks == per_node else 1 / per_node


def _seconds(collectives: Mapping[str, tuple[int, int]], cluster: Cluster, links: Links) -> float:
    ranks, per_node = cluster.ranks, cluster.per_node
    is_one_node = ranks == per_node
    latency = links.latency_within if is_one_node else links.latency_between
    seconds = 0.0
    for kind, (calls, nbytes) in collectives.items():
        outside, is_pairwise = _outside(kind, cluster), kind in _PAIRWISE
        of_node = nbytes * outside * per_node  # all that its ranks send to others
        # In a ring the rank that sends to another node is as busy as the others, and no rank waits for two links.
        inside = nbytes * (1 - outside) if is_pairwise or is_one_node else float(nbytes)
        inside_seconds = inside / links.within if per_node > 1 else 0.0
        messages = calls / (ranks - 1) if kind == "isend" else calls
        rounds = 1 if is_pairwise else math.ceil(math.log2(ranks))
        seconds += max(inside_seconds, of_node / links.between) + messages * latency * rounds
    return seconds


def own_work(ranks: Sequence[Sequence[Sequence[float]]]) -> Span:
    """Return the seconds of a step's own work, of those by rank, step and part of a step.

    Ranks wait for one another at each step at least, at each part at most: the rank that is slowest in one part is not
    so in the next, and collectives make the others wait for it.
    """
    least = [max(map(sum, step)) for step in zip(*ranks, strict=True)]
    most = [sum(map(max, zip(*step, strict=True))) for step in zip(*ranks, strict=True)]
    return Span(statistics.quantiles(least)[0], statistics.quantiles(most)[2])


def bounds(sent: Crossing, work: Span) -> Bounds:
    """Return the bounds for a rank's own ``work`` in a step; of 0 seconds where it is not known."""
    return Bounds(max(sent.seconds.least, work.least), sent.seconds.most + work.most)
