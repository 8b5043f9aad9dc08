"""Whole parameters have owners, the ranks that step them: their choice, reductions to them, broadcasts from them.

An optimizer that computes with whole matrices needs each on one rank, its owner. The gradient of a parameter is reduced
to its owner alone, and the owner broadcasts the stepped parameter: summed over the ranks, as many bytes as to shard the
parameter evenly. NCCL gets all reduces of a bucket in one launch, and all broadcasts. Off NCCL, where ranks exchange
messages, one exchange reduces to all owners at a time, so that no link waits for another one; with several nodes, one
exchange within each node, to the rank with the owner's local rank, and one between nodes (``nodes.py``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zerosync_strategy.core.comm.collectives import (
    InFlight,
    Summing,
    exchange,
    grouped,
    is_native,
    note_launch,
    sum_messages,
    tree_sum,
)
from zerosync_strategy.core.comm.journal import Message, SentCounter
from zerosync_strategy.core.comm.nodes import Nodes


def assign_owners(costs: Sequence[float], numels: Sequence[int], world_size: int) -> list[int]:
    """Return the rank that owns each parameter; the same on every rank that asks.

    First the parameters with a cost, by decreasing cost, each to the rank with the least cost so far; then the others,
    each to the rank with the fewest elements. A rank with more than an even share of all elements gets no further
    parameter with a cost. So a rank has at most an even share and one largest parameter.

    Args:
        costs: of the step of each parameter, in any unit; 0: of its elements alone.
    """
    owners = [0] * len(costs)
    loads = [0] * world_size
    ranks = [(0.0, 0, rank) for rank in range(world_size)]  # by cost, then by elements
    total = sum(numels)
    by_cost = sorted(range(len(costs)), key=lambda index: (-costs[index], -numels[index], index))
    for index in by_cost:
        if not costs[index]:
            break
        while ranks[0][1] * world_size > total:
            heapq.heappop(ranks)
        cost, numel, owner = ranks[0]
        owners[index] = owner
        loads[owner] = numel + numels[index]
        heapq.heapreplace(ranks, (cost + costs[index], loads[owner], owner))
    ranks = [(0.0, numel, rank) for rank, numel in enumerate(loads)]
    heapq.heapify(ranks)
    for index in (index for index in by_cost if not costs[index]):
        _, numel, owner = ranks[0]
        owners[index] = owner
        heapq.heapreplace(ranks, (0.0, numel + numels[index], owner))
    return owners


def choose_owners(shapes: Iterable[Sequence[int]], process_group: ProcessGroup) -> list[int]:
    """Return the rank of ``process_group`` that owns each parameter, from their ``shapes`` alone."""
    shapes = list(shapes)
    costs, numels = [step_cost(shape) for shape in shapes], [math.prod(shape) for shape in shapes]
    return assign_owners(costs, numels, dist.get_world_size(process_group))


def step_cost(shape: Sequence[int]) -> float:
    """Return what the step of a parameter costs, as by Newton-Schulz: products of a matrix with its transpose.

    A parameter of fewer than two dimensions costs nothing extra.
    """
    if len(shape) < 2:
        return 0.0
    rows, columns = shape[0], math.prod(shape[1:])
    return float(rows * columns * min(rows, columns))


def reduce_to_owners(
    rows: Mapping[int, Tensor], own: Tensor, process_group: ProcessGroup, how: Summing, out: Tensor | None,
    ranks: Sequence[int] | None = None,
) -> InFlight:  # fmt: skip
    """Sum over ``ranks`` of ``process_group``; each receives the sum of its row, where it has one.

    Args:
        rows: flat, by the index of the owner in ``ranks``; the same on every rank. They must not change until the wait,
            which may write to them.
        own: the row of this rank; empty if it has none. Off NCCL it may have a wider dtype than what is sent.
        out: where the result may go.
        ranks: of ``process_group``, in their order; ``None``: all. On NCCL, those are all.

    Returns:
        The sum, of the size of ``own``; its dtype is that of :func:`~collectives.reduce_scatter`.
    """
    from deepspeed import comm

    ranks = range(dist.get_world_size(process_group)) if ranks is None else ranks
    number, count, device = ranks.index(dist.get_rank(process_group)), len(ranks), own.device
    if out is not None and (out.device != device or out.dtype != own.dtype):
        out = None
    if not is_native(process_group, device):
        return sum_messages(rows, own, ranks, process_group, how, out)
    if not rows:
        return InFlight([], lambda: own)
    if how.ordered:
        packed = torch.cat([rows[owner] for owner in sorted(rows)])
        received_all = packed.new_empty(count, own.numel())
        sizes = [rows[owner].numel() if owner in rows else 0 for owner in range(count)]
        how.counter.add("all_to_all_single", packed.nbytes, process_group)
        work = comm.all_to_all_single(
            received_all.view(-1), packed, [own.numel()] * count, sizes, group=process_group, async_op=True
        )
        note_launch(process_group, device, how.label)
        return InFlight([work], lambda: tree_sum(received_all), alive=packed)
    with grouped(process_group, device, how.label) as works:
        for owner, row in rows.items():
            root = dist.get_global_rank(process_group, owner)
            how.counter.add("reduce", 0 if owner == number else row.nbytes, process_group)
            works.append(comm.reduce(row, root, group=process_group, async_op=True))
    return InFlight(works, lambda: rows.get(number, own), alive=rows)


def give_from_owners(
    parts: Sequence[tuple[int, Tensor]], process_group: ProcessGroup, counter: SentCounter, tag: int, label: str,
    nodes: Nodes | None = None,
) -> InFlight:  # fmt: skip
    """Broadcast ``parts``, pairs of an owner and a flat tensor, in place, over ``process_group``.

    With ``nodes``, off NCCL, an owner sends its parts to its local rank on other nodes, which sends them on.
    """
    from deepspeed import comm

    rank, device = dist.get_rank(process_group), parts[0][1].device
    if not is_native(process_group, device):
        if nodes is not None:
            return _relay_from_owners(parts, nodes, counter, tag, label)
        of: dict[int, list[Tensor]] = {}
        for owner, part in parts:
            of.setdefault(owner, []).append(part)
        own = of.pop(rank, [])
        peers = [peer for peer in range(dist.get_world_size(process_group)) if peer != rank and (own or peer in of)]
        messages: list[Message] = [(peer, own, of.get(peer, [])) for peer in peers]
        return exchange(messages, process_group, counter, tag, label, lambda: parts[0][1])
    with grouped(process_group, device, label) as works:
        for owner, part in parts:
            source = dist.get_global_rank(process_group, owner)
            counter.add("broadcast", part.nbytes, process_group)
            works.append(comm.broadcast(part, source, group=process_group, async_op=True))
    return InFlight(works, lambda: parts[0][1], alive=parts)


def _relay_from_owners(
    parts: Sequence[tuple[int, Tensor]], nodes: Nodes, counter: SentCounter, tag: int, label: str
) -> InFlight:
    of: dict[int, list[Tensor]] = {}
    of_local_rank: dict[int, list[Tensor]] = {}
    for owner, part in parts:
        of.setdefault(owner, []).append(part)
        of_local_rank.setdefault(owner % nodes.size, []).append(part)
    node, local_rank = nodes.node, nodes.local_rank
    own = of.get(nodes.rank(node, local_rank), [])
    others = (nodes.rank(other, local_rank) for other in range(nodes.count) if other != node)
    between: list[Message] = [(peer, own, of.get(peer, [])) for peer in others]
    within: list[Message] = [
        (nodes.rank(node, other), of_local_rank.get(local_rank, []), of_local_rank.get(other, []))
        for other in range(nodes.size)
        if other != local_rank
    ]
    return nodes.relay(between, within, counter, tag, label, parts[0][1], parts)


def all_to_all(
    sent: Tensor, received: Tensor, sent_numels: Sequence[int], received_numels: Sequence[int],
    process_group: ProcessGroup, counter: SentCounter, tag: int, label: str,
) -> InFlight:  # fmt: skip
    """Exchange parts of any sizes among the ranks of ``process_group``; both tensors are flat, by rank."""
    from deepspeed import comm

    rank = dist.get_rank(process_group)
    if not is_native(process_group, sent.device):
        parts, into = sent.split(list(sent_numels)), received.split(list(received_numels))
        into[rank].copy_(parts[rank])
        peers = (peer for peer in range(len(parts)) if peer != rank)
        messages: list[Message] = [
            (peer, (parts[peer],), (into[peer],)) for peer in peers if len(parts[peer]) or len(into[peer])
        ]
        return exchange(messages, process_group, counter, tag, label, lambda: received)
    counter.add("all_to_all_single", sent.nbytes, process_group)
    work = comm.all_to_all_single(
        received, sent, list(received_numels), list(sent_numels), group=process_group, async_op=True
    )
    note_launch(process_group, sent.device, label)
    return InFlight([work], lambda: received, alive=sent)
