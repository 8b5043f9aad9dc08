"""Reduce-scatter that sends each byte once, on any backend, and finishes later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Pending:
    """A collective in flight. ``finish`` waits for it and returns this rank's result."""

    finish: Callable[[], torch.Tensor]


def reduce_scatter(rows: torch.Tensor, process_group: Any) -> Pending:
    """Sum ``rows`` over the ranks of ``process_group``; rank r is given the sum of row r.

    Args:
        rows: (W, n), contiguous; row r is for rank r. Must stay as it is until ``finish``.

    Returns:
        A pending (n,) tensor: on NCCL in the dtype of ``rows``, summed in NCCL's order; elsewhere in fp32, summed in
        the order of the ranks. gloo's own reduce-scatter is an all-reduce, which sends twice the bytes, so there each
        rank is sent its row by everyone and adds them up.
    """
    from deepspeed import comm

    world_size, columns = rows.shape
    if dist.get_backend(process_group) == "nccl":
        result = rows.new_empty(columns)
        work = comm.reduce_scatter_tensor(result, rows, group=process_group, async_op=True)

        def finish() -> torch.Tensor:
            work.wait()
            return result

        return Pending(finish)

    received = torch.empty_like(rows)
    work = comm.all_to_all_single(received.view(-1), rows.view(-1), group=process_group, async_op=True)

    def finish_sum() -> torch.Tensor:
        work.wait()
        total = received[0].float()
        for rank in range(1, world_size):
            total += received[rank]
        return total

    return Pending(finish_sum)
