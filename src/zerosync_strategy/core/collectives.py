"""Reduce-scatter that sends each byte once, on any backend, and finishes later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Pending:
    """A collective in flight. ``finish`` waits for it and returns this rank's result."""

    finish: Callable[[], torch.Tensor]


def reduce_scatter(packed: torch.Tensor, widths: Sequence[int], process_group: Any, ordered: bool) -> Pending:
    """Sum over the ranks of ``process_group``; rank r is given the sum of the r-th part of ``packed``.

    NCCL reduce-scatters where the parts are of one size, and else reduces each part to its rank. Everywhere else, and
    with ``ordered``, each rank is sent its part by everyone and adds them up: gloo's own reduce-scatter is an
    all-reduce, which sends twice the bytes.

    Args:
        packed: flat, the parts one after the other. Must stay as it is until ``finish``; NCCL may write to it.
        widths: the size of each rank's part.
        ordered: sum in fp32 in the order of the ranks on NCCL too.

    Returns:
        A pending tensor of this rank's width: on NCCL in the dtype of ``packed``, else in fp32 and in the order of the
        ranks.
    """
    from deepspeed import comm

    rank, world_size = dist.get_rank(process_group), len(widths)
    if dist.get_backend(process_group) != "nccl" or ordered:
        received = packed.new_empty(world_size * widths[rank])
        work = comm.all_to_all_single(
            received, packed, [widths[rank]] * world_size, list(widths), group=process_group, async_op=True
        )
        return Pending(lambda: _sum_when_done(work, received.view(world_size, -1)))
    if len(set(widths)) == 1:
        result = packed.new_empty(widths[rank])
        work = comm.reduce_scatter_tensor(result, packed, group=process_group, async_op=True)
        return Pending(lambda: _when_done([work], result))
    parts = packed.split(list(widths))
    works = [
        comm.reduce(part, dst=dist.get_global_rank(process_group, owner), group=process_group, async_op=True)
        for owner, part in enumerate(parts)
        if len(part)
    ]
    return Pending(lambda: _when_done(works, parts[rank]))


def _when_done(works: list[Any], result: torch.Tensor) -> torch.Tensor:
    for work in works:
        work.wait()
    return result


def _sum_when_done(work: Any, received: torch.Tensor) -> torch.Tensor:
    work.wait()
    total = received[0].float()
    for row in received[1:]:
        total += row
    return total
