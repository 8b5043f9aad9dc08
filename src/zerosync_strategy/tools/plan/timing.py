"""From what a rank sends to what crosses which link, and to bounds of the step's time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerosync_strategy.tools.links import Links
from zerosync_strategy.tools.plan.jobs import BETWEEN, WITHIN, Cluster

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
        seconds: at least those of the busier kind of link for the bytes alone, since the two kinds may be busy at once,
            and the latencies of what is sent at once hide one another; at most for all collectives one after another,
            latencies included.
        in_turn: seconds of all collectives one after another for the bytes alone, by which plans are compared.
    """

    within: float
    between: float
    seconds: Span
    in_turn: float


@dataclass(frozen=True)
class Floor:
    """Bytes that one rank must send in a step, as a mean over the ranks, within its node and to other nodes."""

    within: float
    between: float

    @property
    def sent(self) -> float:
        return self.within + self.between


def floor(nbytes: int, cluster: Cluster) -> Floor:
    """Return what must be sent to reduce-scatter or all-gather ``nbytes`` once, each byte to a node once."""
    nodes = cluster.ranks // cluster.per_node
    between = nbytes * (nodes - 1) / cluster.ranks
    return Floor(nbytes * (cluster.ranks - 1) / cluster.ranks - between, between)


@dataclass(frozen=True)
class Bounds:
    """Seconds of one optimizer step: all that is sent is hidden behind a rank's own work or the reverse, or nothing."""

    lower: float
    upper: float


def crossing(collectives: Mapping[str, tuple[int, int]], cluster: Cluster) -> Crossing:
    """Spread over the links what one rank sends: by kind of collective, calls and bytes.

    Collectives go around a ring in the order of the ranks: one rank of each node sends to the next node. What is sent
    point to point, or to all, goes to every other rank alike. A call costs the latency of the slowest link that it
    crosses: once point to point, else once for each doubling of the ranks. Those of one node, or of one rank of each,
    have such a ring of their own, of which as many are busy at once as there are nodes, or ranks on a node.
    """
    parts = [_part(kind, cluster) for kind in collectives]
    sent = [nbytes for _, nbytes in collectives.values()]
    between = sum(nbytes * part.outside for nbytes, part in zip(sent, parts, strict=True))
    uses = [part.busy(nbytes, cluster, cluster.links) for nbytes, part in zip(sent, parts, strict=True)]
    least = max((sum(of_links) for of_links in zip(*uses, strict=True)), default=0.0)
    slow, most = cluster.slow_links or cluster.links, 0.0
    for (calls, nbytes), part in zip(collectives.values(), parts, strict=True):
        most += max(part.busy(nbytes, cluster, slow)) + calls * part.latency(slow)
    return Crossing(sum(sent) - between, between, Span(least, most), sum(map(max, uses)))


@dataclass(frozen=True)
class _Part:
    """How collectives of one kind use the links.

    Attributes:
        ranks: that take part in one.
        outside: part of its bytes that one rank sends to other nodes, as a mean over the ranks.
        is_pairwise: sent to each rank apart, and not around a ring.
        is_message: a call is one of an exchange's messages.
    """

    ranks: int
    outside: float
    is_pairwise: bool
    is_message: bool

    def busy(self, nbytes: int, cluster: Cluster, links: Links) -> tuple[float, float]:
        """Return the seconds within a node and between nodes for the bytes that one rank sends."""
        # In a ring the rank that sends to another node is as busy as the others, and no rank waits for two links.
        inside = 1 - self.outside if self.is_pairwise or self.outside in (0.0, 1.0) else 1.0
        of_node = nbytes * self.outside * cluster.per_node  # all that its ranks send to others
        return nbytes * inside / links.within, of_node / links.between

    def latency(self, links: Links) -> float:
        """Return the seconds of a call beside those of its bytes."""
        latency = links.latency_between if self.outside else links.latency_within
        return (
            latency
            * (1 if self.is_pairwise else math.ceil(math.log2(self.ranks)))
            / (self.ranks - 1 if self.is_message else 1)
        )


def _part(kind: str, cluster: Cluster) -> _Part:
    ranks, per_node = cluster.ranks, cluster.per_node
    name = kind.removesuffix(WITHIN).removesuffix(BETWEEN)
    is_pairwise = name in _PAIRWISE
    if kind.endswith(WITHIN):
        taking_part, outside = per_node, 0.0
    elif kind.endswith(BETWEEN):
        taking_part, outside = ranks // per_node, 1.0
    elif is_pairwise:
        taking_part, outside = ranks, (ranks - per_node) / (ranks - 1)
    else:
        taking_part, outside = ranks, 0.0 if ranks == per_node else 1 / per_node
    return _Part(taking_part, outside, is_pairwise, name == "isend")


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
