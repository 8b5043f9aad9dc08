"""Nodes: which ranks of a process group have fast links among them.

An exchange in *two levels* sends each byte between nodes once, whatever the number of ranks on a node. Rank
``m * size + g`` is the g-th of node m. A reduction first gives the g-th rank of each node the node's sums of the rows
of all g-th ranks, its *node shard*; of these the g-th ranks of all nodes then reduce-scatter one row each. A gather
goes the other way. Rows are picked so, and not in one piece per rank of a node, because each rank then ends with its
own.

Off NCCL, messages go point to point, and what is gathered in two levels goes on by a relay (``relay.py``). A reduction
goes on where it is waited for, which is in the same place on all ranks. Rows of any lengths, of parameters that have
owners, go the same ways (``owners.py``).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import (
    InFlight,
    Message,
    Summing,
    all_gather,
    count_sent,
    exchange,
    gather_words,
    is_native,
    reduce_scatter,
    send_and_receive,
    sum_messages,
    timeout_of,
)
from zerosync_strategy.core.comm.messages import loopback
from zerosync_strategy.core.comm.relay import Relay
from zerosync_strategy.core.engine.interpose import replaced
from zerosync_strategy.core.options.budgets import AUTO


class Sent(NamedTuple):
    """Bytes that one rank sends, and how many of them to other nodes."""

    nbytes: int = 0
    between: int = 0

    def plus(self, other: Sent) -> Sent:
        return Sent(self.nbytes + other.nbytes, self.between + other.between)


class Topology:
    """On which node each rank is. Made alike on all ranks of a process group.

    Args:
        node_size: ranks on a node, of consecutive numbers; ``"auto"``: as many as ``LOCAL_WORLD_SIZE`` says, and where
            a launcher does not set it, those that share a loopback interface. Collective then.
        process_group: of all ranks that are asked for.

    Raises:
        ValueError: ``node_size`` does not divide the number of ranks.
    """

    def __init__(self, node_size: int | str, process_group: Any) -> None:
        self._found: dict[Any, Nodes | None] = {}
        self._counts: dict[Any, tuple[int, int, int]] = {}  # by process group: nodes, ranks, pairs on two nodes
        ranks = dist.get_process_group_ranks(process_group)
        if node_size != AUTO:
            size, everyone = int(node_size), dist.get_world_size()
            if everyone % size:
                raise ValueError(
                    f"ZeroSync option 'node_size' got {size}, which does not divide the {everyone} ranks. Give the"
                    " number of ranks on each node; where nodes have different numbers of them, leave it out, and"
                    " exchanges have one level."
                )
            self._node_of: dict[int, Any] = {rank: rank // size for rank in ranks}
            return
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
        found = gather_words([local, *loopback()], process_group)
        said = {words[0] for words in found}
        if said == {0}:
            self._node_of = {rank: tuple(words) for rank, words in zip(ranks, found, strict=True)}
        else:
            self._node_of = {rank: rank // local if said == {local} else 0 for rank in ranks}

    def of(self, process_group: Any) -> Nodes | None:
        """Return the nodes of ``process_group``, always the same; ``None`` where two levels would be one.

        That is on one node, with one rank on each, with different numbers of ranks on them, or where the ranks of a
        node do not follow each other.
        """
        if process_group not in self._found:
            self._found[process_group] = self._find(process_group)
        return self._found[process_group]

    def sent(self, nbytes: int, process_group: Any, distinct: bool = False) -> Sent:
        """Return what this rank sends when ``nbytes`` are reduce-scattered or all-gathered once.

        Args:
            distinct: an all-to-all instead, of so many bytes of this rank.
        """
        ranks = dist.get_world_size(process_group)
        nbytes = nbytes * (ranks - 1) // ranks
        return Sent(nbytes, self.between(nbytes, process_group, distinct=distinct))

    def between(self, nbytes: int, process_group: Any, to: int | None = None, distinct: bool = False) -> int:
        """Return how many of the bytes that this rank sends go to other nodes, where none is sent there twice.

        Args:
            nbytes: that it sends over ``process_group``; of a collective, as a mean over the ranks.
            to: the rank, of the default process group, to which all of it goes; ``None``: to all.
            distinct: each rank is sent bytes of its own, so that ranks of one node share none.
        """
        if to is not None:
            return 0 if self._node_of[to] == self._node_of[dist.get_rank()] else nbytes
        if process_group not in self._counts:
            sizes = Counter(self._node_of[rank] for rank in dist.get_process_group_ranks(process_group))
            ranks = sizes.total()
            pairs = ranks**2 - sum(size**2 for size in sizes.values())  # of ranks on two nodes
            self._counts[process_group] = len(sizes), ranks, pairs
        nodes, ranks, pairs = self._counts[process_group]
        if distinct:
            return nbytes * pairs // max(ranks * (ranks - 1), 1)
        return nbytes * (nodes - 1) // max(ranks - 1, 1)

    def _find(self, process_group: Any) -> Nodes | None:
        ranks: Sequence[int] = dist.get_process_group_ranks(process_group)
        nodes = [self._node_of[rank] for rank in ranks]
        count = len(set(nodes))
        size = len(nodes) // count
        runs = [nodes[first : first + size] for first in range(0, len(nodes), size)]
        if 1 in (count, size) or len(runs) != count or any(len(set(run)) > 1 for run in runs):
            return None
        return Nodes(process_group, size, count)


class Nodes:
    """The ``count`` nodes of one process group, each with ``size`` of its ranks. This one has ``place`` on ``node``."""

    def __init__(self, process_group: Any, size: int, count: int) -> None:
        self.process_group, self.size, self.count = process_group, size, count
        self.node, self.place = divmod(dist.get_rank(process_group), size)
        self._relay = Relay()
        self._within: Any = None  # the process groups of this node, and of the ranks with this one's place
        self._between: Any = None

    def connect(self, device: torch.device) -> None:
        """Make the process groups of both levels, where the backend needs them for tensors on ``device``. Collective.

        Before a backward has to wait for it, and on all ranks in one order.
        """
        if self._within is None and is_native(self.process_group, device):
            self._within = self._new_group([self.rank(self.node, place) for place in range(self.size)])
            self._between = self._new_group([self.rank(node, self.place) for node in range(self.count)])

    def _new_group(self, ranks: Sequence[int]) -> Any:
        everyone, timeout = dist.get_process_group_ranks(self.process_group), timeout_of(self.process_group)
        # With a bound device, torch would split the default group's communicator, in which all of its ranks take part,
        # where only those of groups with nodes come.
        with replaced(dist.group.WORLD, "bound_device_id", None):
            return dist.new_group([everyone[rank] for rank in ranks], timeout, use_local_synchronization=True)

    def rows_of_place(self, rows: torch.Tensor) -> torch.Tensor:
        """Return those of ``rows``, one per rank of the process group, that belong to ranks with this one's place."""
        return rows[self.place :: self.size]

    def empty_rows(self, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return ``width`` columns of any values for each rank: by node, and by place."""
        if is_native(self.process_group, device):  # which receives those of one rank in one piece
            return torch.empty(self.size, self.count, width, dtype=dtype, device=device).transpose(0, 1)
        return torch.empty(self.count, self.size, width, dtype=dtype, device=device)

    def own_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return those of :meth:`empty_rows` that this rank gives to its node."""
        return rows[:, self.place]

    def gather_within(self, rows: torch.Tensor, tag: int, label: object) -> InFlight:
        """Give the ranks of this node what each of them has of ``rows``, of :meth:`empty_rows`; returns them."""
        if is_native(self.process_group, rows.device):
            gather = all_gather(rows.transpose(0, 1).view(self.size, -1), self._within, label=label)
            gather.then(lambda own: rows)
            return gather
        own = self.own_rows(rows).unbind(0)
        messages = [
            (self.rank(self.node, place), own, rows[:, place].unbind(0))
            for place in range(self.size)
            if place != self.place
        ]
        return exchange(messages, self.process_group, tag, "", lambda: rows)

    def reduce_within(self, rows: torch.Tensor, how: Summing) -> InFlight:
        """Sum over the ranks of this node. ``rows`` has one row per rank of the process group.

        Returns:
            The node shard: sums of the rows of all ranks that have the place of this one, by node.
        """
        width = rows.shape[1]
        by_place = rows.view(self.count, self.size, width).transpose(0, 1)
        if is_native(self.process_group, rows.device):
            reduction = reduce_scatter(by_place.reshape(self.size, -1), self._within, how)
            reduction.then(lambda sums: sums.view(self.count, width))
            return reduction
        _, ranks = self.ranks_within(rows.device)
        own = by_place[self.place]
        return sum_messages(dict(enumerate(by_place)), own, ranks, self.process_group, how, None)

    def reduce_between(
        self, sums: torch.Tensor, dtype: torch.dtype, how: Summing, out: torch.Tensor | None
    ) -> InFlight:
        """Sum node shards over the nodes, sent in ``dtype``.

        Returns:
            The sum of this rank's own row, as :func:`~collectives.reduce_scatter` returns it.
        """
        sent = sums.to(dtype)
        if is_native(self.process_group, sums.device):
            return reduce_scatter(sent, self._between, how, out)
        _, ranks = self.ranks_between(sums.device)
        own = sums[self.node]
        return sum_messages(dict(enumerate(sent)), own, ranks, self.process_group, how, out)

    def all_gather(self, rows: torch.Tensor, tag: int, label: str) -> InFlight:
        """As :func:`collectives.all_gather` off NCCL, in two levels."""
        by_place = rows.view(self.count, self.size, -1)
        own = by_place[self.node, self.place]
        between: list[Message] = [
            (self.rank(node, self.place), (own,), (by_place[node, self.place],))
            for node in range(self.count)
            if node != self.node
        ]
        within: list[Message] = [
            (self.rank(self.node, place), by_place[:, self.place].unbind(0), by_place[:, place].unbind(0))
            for place in range(self.size)
            if place != self.place
        ]
        return self.relay(between, within, tag, label, own, rows)

    def relay(
        self, between: Sequence[Message], within: Sequence[Message], tag: int, label: str, result: torch.Tensor,
        alive: Any,
    ) -> InFlight:  # fmt: skip
        """Exchange ``between`` nodes, and when that has arrived ``within`` this one; returns ``result``. Off NCCL.

        Every rank calls this, also without messages.
        """
        first = send_and_receive(between, self.process_group, tag)
        timeout = timeout_of(self.process_group)
        count_sent(within, self.process_group)
        second = partial(send_and_receive, within, self.process_group, tag, dist)
        return InFlight([self._relay.launch_after(first, timeout, second)], lambda: result, alive, timeout, label)

    def ranks_within(self, device: torch.device) -> tuple[Any, list[int]]:
        """Return a process group, and the ranks in it of this node, by place, to exchange tensors on ``device``."""
        if self._within is not None and is_native(self.process_group, device):
            return self._within, list(range(self.size))
        return self.process_group, [self.rank(self.node, place) for place in range(self.size)]

    def ranks_between(self, device: torch.device) -> tuple[Any, list[int]]:
        """As :meth:`ranks_within`; of this rank's place, by node."""
        if self._between is not None and is_native(self.process_group, device):
            return self._between, list(range(self.count))
        return self.process_group, [self.rank(node, self.place) for node in range(self.count)]

    def rank(self, node: int, place: int) -> int:
        """Return the number in the process group of the rank that has this place on that node."""
        return node * self.size + place
