"""Asynchronous reduce-scatter and all-gather that send each byte once, on any backend.

NCCL has both. gloo's reduce-scatter is an all-reduce, which sends twice the bytes, and its all-gather and all-to-all
copy what they send. So off NCCL, ranks send each other their shards point to point, without copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_timeout

from zerosync_strategy.core.comm.waits import Wait, issue_exchange, waiting


@dataclass(frozen=True)
class Pending:
    """A collective in flight.

    Attributes:
        finish: waits for it and returns this rank's result.
        works: of the process group.
    """

    finish: Callable[[], torch.Tensor]
    works: Sequence[Any]

    def wait(self) -> None:
        """As torch's works have it."""
        self.finish()

    @property
    def is_complete(self) -> bool:
        """Whether it needs its tensors no longer. gloo does not say it of a send or receive that nobody waits for."""
        return all(work.is_completed() for work in self.works)


def reduce_scatter(
    packed: torch.Tensor, widths: Sequence[int], process_group: Any, ordered: bool, tag: int = 0
) -> Pending:
    """Sum over the ranks of ``process_group``; rank r receives the sum of the r-th part of ``packed``.

    NCCL reduce-scatters where the parts are of one size, and else reduces each part to its rank. With ``ordered``, and
    off NCCL, each rank receives its part from every rank and adds them up.

    Args:
        packed: flat, the parts one after the other. Must stay as it is until ``finish``, which may write to it.
        widths: the size of each rank's part.
        ordered: sum in fp32 in the order of the ranks on NCCL too.
        tag: off NCCL, only calls with the same tag meet.

    Returns:
        A pending tensor of this rank's width: on NCCL in the dtype of ``packed``, else in fp32 and in the order of the
        ranks.
    """
    from deepspeed import comm

    rank, world_size = dist.get_rank(process_group), len(widths)
    parts = list(packed.split(list(widths)))
    if dist.get_backend(process_group) != "nccl":
        received = packed.new_empty(world_size - 1, widths[rank])
        rows = [*received[:rank], parts[rank], *received[rank:]]
        exchange = _exchange(parts, rows, process_group, tag)
        return Pending(lambda: _sum_when_done(exchange, rows), exchange.works)
    if ordered:
        received_all = packed.new_empty(world_size * widths[rank])
        splits = [widths[rank]] * world_size
        work = comm.all_to_all_single(received_all, packed, splits, list(widths), group=process_group, async_op=True)
        return Pending(lambda: _sum_when_done(_Works([work]), list(received_all.view(world_size, -1))), [work])
    if len(set(widths)) == 1:
        result = packed.new_empty(widths[rank])
        work = comm.reduce_scatter_tensor(result, packed, group=process_group, async_op=True)
        return Pending(lambda: _when_done(_Works([work]), result), [work])
    works = [
        comm.reduce(part, dst=dist.get_global_rank(process_group, owner), group=process_group, async_op=True)
        for owner, part in enumerate(parts)
        if len(part)
    ]
    return Pending(lambda: _when_done(_Works(works), parts[rank]), works)


def all_gather(parts: Sequence[torch.Tensor], process_group: Any, tag: int = 0) -> Pending:
    """Give every rank of ``process_group`` all ``parts``, of which rank r has the r-th. For backends but NCCL.

    Args:
        parts: contiguous, one per rank; this rank's is read, the others are written.
        tag: only calls with the same tag meet, and others wait in vain. gloo ends a process in which two of its own
            all-gathers meet that are of different sizes.

    Returns:
        This rank's part, pending.
    """
    own = parts[dist.get_rank(process_group)]
    exchange = _exchange([own] * len(parts), list(parts), process_group, tag)
    return Pending(lambda: _when_done(exchange, own), exchange.works)


def all_gather_rows(rows: torch.Tensor, process_group: Any) -> None:
    """Give every rank of ``process_group`` all ``rows``, of which rank r has the r-th. On any backend."""
    from deepspeed import comm

    if dist.get_backend(process_group) == "nccl":
        comm.all_gather_into_tensor(rows.view(-1), rows[dist.get_rank(process_group)], group=process_group)
    else:
        all_gather(list(rows), process_group).wait()


def gather_objects(value: Any, process_group: Any) -> list[Any]:
    """Return the ``value`` of every rank of ``process_group``, by rank. Pickled: for small and rare messages."""
    values: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(values, value, group=process_group)
    return values


def broadcast_object(value: Any, rank: int, process_group: Any) -> Any:
    """Return the ``value`` of the rank that ``process_group`` counts as ``rank``. Pickled: for rare messages."""
    values = [value if dist.get_rank(process_group) == rank else None]
    source = rank if process_group is None else dist.get_global_rank(process_group, rank)
    dist.broadcast_object_list(values, src=source, group=process_group)
    return values[0]


def is_alike(words: Sequence[int], process_group: Any) -> bool:
    """Return whether all ranks of ``process_group`` have the same ``words`` of 64 bits. The same on every rank."""
    own = torch.tensor(words, dtype=torch.int64, device=_device_of(process_group))
    extremes = torch.cat([own, ~own])  # the largest complement is the smallest word's
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=process_group)
    largest, complement = extremes.view(2, -1)
    return torch.equal(largest, ~complement)


def gather_words(words: Sequence[int], process_group: Any) -> list[list[int]]:
    """Return the ``words`` of 64 bits, as many on every rank, of all ranks of ``process_group``."""
    own = torch.tensor(words, dtype=torch.int64, device=_device_of(process_group))
    received = [torch.empty_like(own) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(received, own, group=process_group)
    return torch.stack(received).tolist()


def _device_of(process_group: Any) -> torch.device:
    """Return where tensors for ``process_group`` may be: on the CPU if it has a backend for it."""
    group: Any = dist.group.WORLD if process_group is None else process_group
    devices = group._device_types
    return torch.device("cpu") if torch.device("cpu") in devices else devices[0]


def timeout_of(process_group: Any) -> timedelta:
    """Return the timeout of ``process_group``."""
    group: Any = dist.group.WORLD if process_group is None else process_group
    return group._get_backend(group._device_types[0]).options._timeout


def share_timeout(process_groups: Iterable[Any]) -> None:
    """Give groups that have torch's default timeout, as those that DeepSpeed makes, the default group's.

    That is the one that users set. Torch's default is 30 minutes, or 10 on NCCL.
    """
    for process_group in process_groups:
        if timeout_of(process_group) == _get_default_timeout(dist.Backend(dist.get_backend(process_group))):
            dist.distributed_c10d._set_pg_timeout(timeout_of(None), process_group)


@dataclass(frozen=True)
class _Works:
    """What to wait for: the works of a process group. An exchange has a timeout, and others may look at who waits."""

    works: Sequence[Any]
    timeout: timedelta | None = None
    wait: Wait | None = None


def _exchange(
    sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], process_group: Any, tag: int = 0
) -> _Works:
    """Send the r-th of ``sent`` to rank r and receive the r-th of ``received`` from it, except for this rank's own."""
    from deepspeed import comm

    rank, works = dist.get_rank(process_group), []
    for peer in range(len(sent)):
        if peer == rank:
            continue
        peer_global = dist.get_global_rank(process_group, peer)
        if len(received[peer]):
            works.append(comm.irecv(received[peer], src=peer_global, group=process_group, tag=tag))
        if len(sent[peer]):
            works.append(comm.isend(sent[peer], dst=peer_global, group=process_group, tag=tag))
    return _Works(works, timeout_of(process_group), issue_exchange(process_group, tag))


def _when_done(pending: _Works, result: torch.Tensor) -> torch.Tensor:
    # NCCL gets no timeout: its watchdog has one, and with a timeout the host would wait instead of a stream. gloo uses
    # the timeout with which the group was made, unless one is passed.
    with waiting(pending.wait):
        for work in pending.works:
            work.wait() if pending.timeout is None else work.wait(pending.timeout)
    return result


def _sum_when_done(pending: _Works, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    total = _when_done(pending, rows[0]).float()
    for row in rows[1:]:
        total += row
    return total
