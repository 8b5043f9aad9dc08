"""Nodes: which ranks of a process group are connected by fast links, and the sizes of messages over these.

An exchange in *two levels* sends each byte between nodes once, for any number of ranks per node. Rank ``m * size + g``
has local rank g on node m. A reduction first sums within each node: local rank g receives the node's sums of the rows
of all ranks with local rank g, its *node shard*. Then the ranks with local rank g on all nodes reduce-scatter their
node shards, one row each. A gather runs in the opposite order. Rows are grouped by local rank, not in one piece per
rank of a node, so that each rank ends with its own row.

Off NCCL, messages go point to point. A reduction starts its second level when it is waited for, at the same point of
the program on all ranks. A gather cannot: this rank may wait for the same ranks in another exchange first. So a thread
(:class:`Relay`) starts the second levels of gathers as their first levels arrive, in the order of issue, which is the
same on all ranks.

Rows of different lengths, for parameters that have owners, use the same exchange (``owners.py``).
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from zerosync_strategy.core.comm.collectives import (
    InFlight,
    Summing,
    all_gather,
    digest,
    exchange,
    gather_words,
    is_alike,
    is_native,
    new_group,
    reduce_scatter,
    send_and_receive,
    sum_messages,
    timeout_of,
)
from zerosync_strategy.core.comm.journal import Message, SentCounter, issue
from zerosync_strategy.core.engine.types import Work
from zerosync_strategy.core.options import AUTO


@dataclass(frozen=True)
class MessageSizes:
    """Sizes of the messages of one process group.

    On NCCL, a collective has DeepSpeed's bucket size, but at least 128 MiB and 2 MiB per rank. It takes that much to
    fill a link, and the Trainer's ``"auto"``, the square of a model's width, is far less. Between gathers, it has at
    most 256 MiB, for which they wait a few ms. Off NCCL, ranks send point to point. Between hosts, messages are small,
    because the first leaves early and the last ends soon after it is complete. Within a host, they are large, because
    each wakes a thread on both sides.

    Attributes:
        nbytes: most bytes of a bucket; a larger parameter is divided.
        in_flight: the most reductions at a time.
        least: least bytes of a bucket, as far as gradients and budgets of memory allow.
    """

    nbytes: int
    in_flight: int
    least: int = 0


NATIVE = MessageSizes(sys.maxsize, 2)
LEAST, LEAST_OF_RANK = 128 * 2**20, 2 * 2**20
AMONG_GATHERS = 256 * 2**20
"""The most bytes of a reduction by NCCL between gathers of the same process group."""
WITHIN_HOST = MessageSizes(16 * 2**20, 2)
BETWEEN_HOSTS = MessageSizes(4 * 2**20, 4)


def message_sizes(process_group: ProcessGroup, device: torch.device) -> MessageSizes:
    """Return the sizes for tensors on ``device`` over ``process_group``, the same on all ranks. Collective."""
    if is_native(process_group, device):
        return replace(NATIVE, least=max(LEAST, LEAST_OF_RANK * dist.get_world_size(process_group)))
    return WITHIN_HOST if on_one_host(process_group) else BETWEEN_HOSTS


def on_one_host(process_group: ProcessGroup) -> bool:
    """Return whether all ranks of ``process_group`` share a loopback interface. Collective, of 64 bytes."""
    return is_alike(loopback(), process_group)


def loopback() -> list[int]:
    """Return a digest of kernel and network namespace, equal for processes that share a loopback interface."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/net")
    except OSError:
        text = socket.gethostname()
    return digest(text)


class Sent(NamedTuple):
    """Bytes that one rank sends, and those of them to other nodes."""

    nbytes: int = 0
    between: int = 0

    def plus(self, other: Sent) -> Sent:
        return Sent(self.nbytes + other.nbytes, self.between + other.between)


class Topology:
    """The node of each rank, the same on all ranks of a process group.

    Args:
        node_size: the number of ranks on a node, which are consecutive. ``"auto"``: ``LOCAL_WORLD_SIZE``, or if the
            launcher does not set it, ranks that share a loopback interface are on one node; collective then.
        process_group: of all ranks that are asked for.

    Raises:
        ValueError: ``node_size`` does not divide the number of ranks.
    """

    def __init__(self, node_size: int | str, process_group: ProcessGroup | None) -> None:
        self._found: dict[ProcessGroup, Nodes | None] = {}
        # By process group: nodes, ranks, pairs on two nodes.
        self._counts: dict[ProcessGroup, tuple[int, int, int]] = {}
        ranks = dist.get_process_group_ranks(process_group)
        if node_size != AUTO:
            size, everyone = int(node_size), dist.get_world_size()
            if everyone % size:
                raise ValueError(
                    f"ZeroSync option 'node_size' got {size}, which does not divide the {everyone} ranks. Give the"
                    " number of ranks on each node; where nodes have different numbers of them, leave it out, and"
                    " exchanges have one level."
                )
            self._node_of: Callable[[int], Hashable] = lambda rank: rank // size
            return
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
        found = gather_words([local, *loopback()], process_group)
        said = {words[0] for words in found}
        if said == {0}:
            nodes = {rank: tuple(words) for rank, words in zip(ranks, found, strict=True)}
            # A program's collectives may be with others, as those of tensor parallelism, which is within a node.
            self._node_of = lambda rank: nodes.get(rank, nodes[dist.get_rank()])
        else:
            self._node_of = lambda rank: rank // local if said == {local} else 0

    def of(self, process_group: ProcessGroup) -> Nodes | None:
        """Return the nodes of ``process_group``, always the same object; ``None`` if its exchanges have one level.

        They have with one node, one rank per node, different numbers of ranks per node, or if the ranks of a node are
        not contiguous in the group.
        """
        if process_group not in self._found:
            self._found[process_group] = self._find(process_group)
        return self._found[process_group]

    def sent(self, nbytes: int, process_group: ProcessGroup, distinct: bool = False) -> Sent:
        """Return what this rank sends for a reduce-scatter or all-gather of ``nbytes``; ``distinct``: an all-to-all."""
        ranks = dist.get_world_size(process_group)
        nbytes = nbytes * (ranks - 1) // ranks
        return Sent(nbytes, self.between(nbytes, process_group, distinct=distinct))

    def between(self, nbytes: int, process_group: ProcessGroup, to: int | None = None, distinct: bool = False) -> int:
        """Return how many of ``nbytes`` that this rank sends go to other nodes, if each byte goes to a node once.

        Args:
            nbytes: sent over ``process_group``; for a collective, as a mean over the ranks.
            to: the only receiver, a rank of the default process group; ``None``: all ranks.
            distinct: each rank receives other bytes, so ranks of one node share none.
        """
        if to is not None:
            return 0 if self._node_of(to) == self._node_of(dist.get_rank()) else nbytes
        if process_group not in self._counts:
            sizes = Counter(map(self._node_of, dist.get_process_group_ranks(process_group)))
            ranks = sizes.total()
            pairs = ranks**2 - sum(size**2 for size in sizes.values())  # of ranks on two nodes
            self._counts[process_group] = len(sizes), ranks, pairs
        nodes, ranks, pairs = self._counts[process_group]
        if distinct:
            return nbytes * pairs // max(ranks * (ranks - 1), 1)
        return nbytes * (nodes - 1) // max(ranks - 1, 1)

    def _find(self, process_group: ProcessGroup) -> Nodes | None:
        ranks: Sequence[int] = dist.get_process_group_ranks(process_group)
        nodes = [self._node_of(rank) for rank in ranks]
        count = len(set(nodes))
        size = len(nodes) // count
        runs = [nodes[first : first + size] for first in range(0, len(nodes), size)]
        if 1 in (count, size) or len(runs) != count or any(len(set(run)) > 1 for run in runs):
            return None
        return Nodes(process_group, size, count)


class Nodes:
    """The ``count`` nodes of one process group, with ``size`` ranks each. This rank is ``local_rank`` on ``node``."""

    def __init__(self, process_group: ProcessGroup, size: int, count: int) -> None:
        self.process_group, self.size, self.count = process_group, size, count
        self.node, self.local_rank = divmod(dist.get_rank(process_group), size)
        self._relay = Relay()
        self._within: Any = None  # the process groups of this node, and of this local rank
        self._between: Any = None

    def connect(self, device: torch.device) -> None:
        """Make the process groups of both levels, which NCCL needs, for tensors on ``device``. Collective.

        All ranks call it in the same order, before the first backward.
        """
        if self._within is None and is_native(self.process_group, device):
            self._within = self._new_group([self.rank(self.node, each) for each in range(self.size)], device)
            self._between = self._new_group([self.rank(node, self.local_rank) for node in range(self.count)], device)

    def _new_group(self, ranks: Sequence[int], device: torch.device) -> ProcessGroup:
        everyone = dist.get_process_group_ranks(self.process_group)
        return new_group([everyone[rank] for rank in ranks], self.process_group, device)

    def rows_of_local_rank(self, rows: torch.Tensor) -> torch.Tensor:
        """Return those of ``rows``, one per rank of the process group, that are for this local rank."""
        return rows[self.local_rank :: self.size]

    def empty_rows(self, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor with ``width`` columns for each rank: by node and local rank."""
        if is_native(self.process_group, device):  # it receives the rows of one rank contiguously
            return torch.empty(self.size, self.count, width, dtype=dtype, device=device).transpose(0, 1)
        return torch.empty(self.count, self.size, width, dtype=dtype, device=device)

    def own_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the part of :meth:`empty_rows` that this rank sends to its node."""
        return rows[:, self.local_rank]

    def gather_within(self, rows: torch.Tensor, counter: SentCounter, tag: int, label: object) -> InFlight:
        """All-gather ``rows``, made by :meth:`empty_rows`, over the ranks of this node; its result is ``rows``."""
        if is_native(self.process_group, rows.device):
            gather = all_gather(rows.transpose(0, 1).view(self.size, -1), self._within, counter, label=label)
            gather.then(lambda own: rows)
            return gather
        own = self.own_rows(rows).unbind(0)
        messages = [
            (self.rank(self.node, peer), own, rows[:, peer].unbind(0))
            for peer in range(self.size)
            if peer != self.local_rank
        ]
        return exchange(messages, self.process_group, counter, tag, "", lambda: rows)

    def reduce_within(self, rows: torch.Tensor, how: Summing) -> InFlight:
        """Sum over the ranks of this node. ``rows`` has one row per rank of the process group.

        Returns:
            The node shard, one row per node: the sum of the rows for this local rank on that node.
        """
        width = rows.shape[1]
        by_local_rank = rows.view(self.count, self.size, width).transpose(0, 1)
        if is_native(self.process_group, rows.device):
            reduction = reduce_scatter(by_local_rank.reshape(self.size, -1), self._within, how)
            reduction.then(lambda sums: sums.view(self.count, width))
            return reduction
        _, ranks = self.ranks_within(rows.device)
        own = by_local_rank[self.local_rank]
        return sum_messages(dict(enumerate(by_local_rank)), own, ranks, self.process_group, how, None)

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

    def all_gather(self, rows: torch.Tensor, counter: SentCounter, tag: int, label: str) -> InFlight:
        """All-gather in two levels off NCCL, as :func:`collectives.all_gather` does in one."""
        by_local_rank = rows.view(self.count, self.size, -1)
        own = by_local_rank[self.node, self.local_rank]
        between: list[Message] = [
            (self.rank(node, self.local_rank), (own,), (by_local_rank[node, self.local_rank],))
            for node in range(self.count)
            if node != self.node
        ]
        within: list[Message] = [
            (self.rank(self.node, peer), by_local_rank[:, self.local_rank].unbind(0), by_local_rank[:, peer].unbind(0))
            for peer in range(self.size)
            if peer != self.local_rank
        ]
        return self.relay(between, within, counter, tag, label, own, rows)

    def relay(
        self, between: Sequence[Message], within: Sequence[Message], counter: SentCounter, tag: int, label: str,
        result: torch.Tensor, alive: object,
    ) -> InFlight:  # fmt: skip
        """Exchange messages ``between`` nodes, then ``within`` this node; the result is ``result``. Off NCCL.

        Every rank has to call it, also one without messages.
        """
        counter.add_messages([*between, *within], self.process_group)
        first = send_and_receive(between, self.process_group, tag)
        timeout = timeout_of(self.process_group)
        second = partial(send_and_receive, within, self.process_group, tag, dist)
        works = [self._relay.launch_after(first, timeout, second)]
        exchange = issue(self.process_group, tag, [*between, *within])
        return InFlight(works, lambda: result, alive, timeout, label, exchange)

    def ranks_within(self, device: torch.device) -> tuple[ProcessGroup, list[int]]:
        """Return a process group for tensors on ``device``, and the ranks in it of this node, by local rank."""
        if self._within is not None and is_native(self.process_group, device):
            return self._within, list(range(self.size))
        return self.process_group, [self.rank(self.node, each) for each in range(self.size)]

    def ranks_between(self, device: torch.device) -> tuple[ProcessGroup, list[int]]:
        """As :meth:`ranks_within`, for the ranks with this local rank, by node."""
        if self._between is not None and is_native(self.process_group, device):
            return self._between, list(range(self.count))
        return self.process_group, [self.rank(node, self.local_rank) for node in range(self.count)]

    def rank(self, node: int, local_rank: int) -> int:
        """Return the rank, in the process group, with ``local_rank`` on ``node``."""
        return node * self.size + local_rank


_Launch = Callable[[], Sequence[Work]]


class RelayedWork:
    """The works of a second level, launched later, as one work."""

    def __init__(self, works: Future[Sequence[Work]]) -> None:
        self._works = works

    def wait(self, timeout: timedelta, /) -> None:
        """Wait until both levels have arrived. Raise ``RuntimeError`` on a timeout, or if a rank has ended."""
        for work in self._works.result():  # the relay's own waits have the timeout
            work.wait(timeout)

    def is_completed(self) -> bool:
        return self._works.done() and (
            self._works.exception() is not None or all(work.is_completed() for work in self._works.result())
        )


_Exchange = tuple[Sequence[Work], timedelta, _Launch, Future[Sequence[Work]]]


class Relay:
    """Launches second levels, one after the other, in a thread that ends with this object or the process."""

    def __init__(self) -> None:
        self._pending: queue.SimpleQueue[_Exchange | None] = queue.SimpleQueue()
        self._started = False

    def launch_after(self, works: Sequence[Work], timeout: timedelta, launch: _Launch) -> RelayedWork:
        """Call ``launch``, which returns the works of the second level, after the works of the first have arrived."""
        if not self._started:
            self._started = True
            threading.Thread(target=_relay, args=(self._pending,), name="zerosync-relay", daemon=True).start()
            weakref.finalize(self, self._pending.put, None)
        launched: Future[Sequence[Work]] = Future()
        self._pending.put((works, timeout, launch, launched))
        return RelayedWork(launched)


def _relay(pending: queue.SimpleQueue[_Exchange | None]) -> None:
    while (exchange := pending.get()) is not None:
        works, timeout, launch, launched = exchange
        try:
            for work in works:
                work.wait(timeout)
            launched.set_result(launch())
        except BaseException as error:
            launched.set_exception(error)
        del exchange, works, launch, launched  # drop what they keep alive
