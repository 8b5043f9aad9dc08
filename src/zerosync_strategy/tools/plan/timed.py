"""The replay with its arithmetic, by as many processes at once as share a machine: a rank's own work and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from zerosync_strategy.tools.plan.jobs import OptionSet, Workload
from zerosync_strategy.tools.plan.training import Training, join

WARM_UP, STEPS = 3, 5
"""Not counted: allocators, and the order of ZeRO-3's gathers, are not settled; and how many are."""


@dataclass(frozen=True)
class Measured:
    """The steps of one rank.

    Attributes:
        seconds: of each step, those of its parts: each forward, each backward, the optimizer step.
        resident: median of the steps' peaks of resident memory, in bytes, as a run log has it.
    """

    seconds: list[list[float]]
    resident: float


def measure_steps(
    workload: Workload,
    options: OptionSet,
    ranks: int,
    backend: str,
    on_one_node: bool,
    threads: int,
    wait: Callable[[], object],
) -> Measured:
    """Train a few steps as rank 0 of ``ranks``, nothing sent.

    All that a rank does itself is in them: forward, backward, copies, sums of gradients, the optimizer, host work of
    DeepSpeed and ZeroSync; also the memory that what arrives would be written to. Zeros arrive.

    Args:
        threads: of torch.
        wait: until the ranks that share this machine's cores have come as far.
    """
    import torch

    from zerosync_strategy.core.runlog import DataGauge, map_large_blocks

    torch.set_num_threads(threads)
    join(ranks, backend, on_one_node)
    map_large_blocks()  # as a run that is logged does
    _write_received()
    gauge = DataGauge()
    before = gauge.used()
    training = Training(workload, options, workload.micro_batches)
    seconds, peaks = [], []
    for _ in range(WARM_UP + STEPS):
        gauge.restart_peak()
        wait()
        times = [time.perf_counter()]
        for _ in range(workload.micro_batches):
            loss = training.forward()
            times.append(time.perf_counter())
            training.backward(loss)
            del loss
            times.append(time.perf_counter())
        training.step()
        times.append(time.perf_counter())
        wait()
        seconds.append([end - began for began, end in pairwise(times)])
        peaks.append(gauge.peak() - before)
    return Measured(seconds[WARM_UP:], statistics.median(peaks[WARM_UP:]))


def _write_received() -> None:
    """Write to what messages would be received into: it takes memory, and what lay there may be no finite number."""
    import torch
    import torch.distributed as dist

    irecv = dist.irecv

    def receive(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tensor.zero_()
        return irecv(tensor, *args, **kwargs)

    dist.irecv = receive
