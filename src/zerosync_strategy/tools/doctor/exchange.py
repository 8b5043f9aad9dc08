"""The links as training meets them: all ranks exchange at once, on CPU after a little computation each time."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerosync_strategy.tools import links

ROUNDS, CALLS = 7, 24
COMPUTED = 3e-3
"""Seconds that a rank computes between two calls, on CPU."""
PEERS = 8
"""Ranks that a rank exchanges with at once, at most."""


def save(file: Path, device: Any) -> None:
    """Measure on all ranks of a process group, and write what a plan is to assume, on rank 0.

    Bandwidth is what a rank sends within its node, or a node to others; latency that of an exchange of 8 bytes. Both
    are means of the calls of a round; the file has the quartiles of the rounds.
    """
    import torch.distributed as dist

    slow: dict[str, float] = {}
    fast: dict[str, float] = {}
    for kind in kinds():
        bandwidths, latencies = _measure(kind, device)
        (low, _, high), (short, _, long) = statistics.quantiles(bandwidths), statistics.quantiles(latencies)
        slow |= {kind: low, f"latency_{kind}": long}
        fast |= {kind: high, f"latency_{kind}": short}
    if dist.get_rank() == 0:
        links.save(file, slow, fast)


def kinds() -> list[str]:
    """Return which kinds of links this job has: within a node, between nodes."""
    world, local = sizes()
    return [kind for kind, is_there in (("within", local > 1), ("between", world > local)) if is_there]


def sizes() -> tuple[int, int]:
    """Return how many ranks there are, and how many of them on this node."""
    return int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def seconds_of(call: Callable[[], object], device: Any) -> float:
    """Return how long ``call`` takes on ``device``."""
    import torch

    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _neighbours(kind: str, rank: int) -> list[tuple[int, int]]:
    """Return whom ``rank`` sends to and receives from at once: the next ones of its node, or its like on the next."""
    world, local = sizes()
    node, index = divmod(rank, local)
    if kind == "within":
        steps = range(1, min(local - 1, PEERS) + 1)
        return [(node * local + (index + i) % local, node * local + (index - i) % local) for i in steps]
    steps = range(1, min(world // local - 1, PEERS) + 1)
    return [((rank + i * local) % world, (rank - i * local) % world) for i in steps]


def _measure(kind: str, device: Any) -> tuple[list[float], list[float]]:
    """Return the bandwidths and the latencies of the rounds.

    Memory is not in a cache. A rank on CPU that computes has not the core that it shares with the threads that send,
    and some ranks come later than others, as in training. Messages are of the size of ZeroSync's: 2 MiB on gloo.
    """
    import torch
    import torch.distributed as dist

    neighbours = _neighbours(kind, dist.get_rank())
    on_cpu = device.type == "cpu"
    computed = torch.zeros(1 << 18)

    def compute() -> None:
        until = time.perf_counter() + COMPUTED
        while on_cpu and time.perf_counter() < until:
            computed.add_(1)

    def exchange(sent: torch.Tensor, received: torch.Tensor) -> None:
        works = []
        for number, (target, source) in enumerate(neighbours):
            works.append(dist.P2POp(dist.irecv, received[number], source))
            works.append(dist.P2POp(dist.isend, sent[number], target))
        for work in dist.batch_isend_irecv(works):
            work.wait()

    def mean(sent: torch.Tensor, received: torch.Tensor) -> float:
        seconds = 0.0
        for call in range(CALLS):
            compute()
            seconds += seconds_of(functools.partial(exchange, sent[call], received[call]), device)
        return seconds / CALLS

    def rounds(length: int) -> list[float]:
        sent, received = (
            torch.zeros(CALLS, len(neighbours), length, dtype=torch.uint8, device=device) for _ in range(2)
        )
        return [mean(sent, received) for _ in range(ROUNDS + 1)][1:]

    length = ((2 if on_cpu else 32) << 20) // len(neighbours)
    latencies, of_large = rounds(8), rounds(length)
    sharing = 1 if kind == "within" else sizes()[1]
    latency = statistics.median(latencies)
    return [sharing * length * len(neighbours) / max(each - latency, 0.1 * each) for each in of_large], latencies
