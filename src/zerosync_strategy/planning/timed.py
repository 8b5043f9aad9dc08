"""The time of a rank's own work: the replay with its arithmetic, by as many processes at once as share a machine."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from typing import Any

from zerosync_strategy.planning.jobs import OptionSet, Workload
from zerosync_strategy.planning.process import map_large_blocks
from zerosync_strategy.planning.training import Training, join

WARM_UP, STEPS = 3, 5
"""Not counted: allocators, and the order of ZeRO-3's gathers, are not settled; and how many are."""


def time_steps(
    workload: Workload,
    options: OptionSet,
    ranks: int,
    backend: str,
    threads: int,
    wait: Callable[[], object],
) -> list[float]:
    """Train a few steps as rank 0 of ``ranks``, nothing sent, and return the seconds of each.

    All that a rank does itself is in them: forward, backward, copies, sums of gradients, the optimizer, host work of
    DeepSpeed and ZeroSync; also the pages of memory that what arrives would take. It is whatever was there before.

    Args:
        threads: of torch.
        wait: until the ranks that share this machine's cores have come as far. A step takes what the slowest takes.
    """
    import torch

    torch.set_num_threads(threads)
    join(ranks, backend)
    map_large_blocks()  # as a run that is logged does
    _take_pages_of_received()
    training = Training(workload, options, workload.micro_batches)
    seconds = []
    for _ in range(WARM_UP + STEPS):
        wait()
        began = time.perf_counter()
        for _ in range(workload.micro_batches):
            training.micro_batch()
        training.step()
        wait()
        seconds.append(time.perf_counter() - began)
    return seconds[WARM_UP:]


def _take_pages_of_received() -> None:
    """Write to each page that a message would be received into: else reading it reads one page of zeros, in cache."""
    import torch
    import torch.distributed as dist

    irecv = dist.irecv

    def receive(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tensor.view(torch.uint8)[:: mmap.PAGESIZE].zero_()
        return irecv(tensor, *args, **kwargs)

    dist.irecv = receive
