"""The links as training meets them: all ranks exchange at once, on CPU after a little computation each time."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

from zerosync_strategy import links

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
    for kind in _kinds():
        bandwidths, latencies = _measure(kind, device)
        (low, _, high), (short, _, long) = statistics.quantiles(bandwidths), statistics.quantiles(latencies)
        slow |= {kind: low, f"latency_{kind}": long}
        fast |= {kind: high, f"latency_{kind}": short}
    if dist.get_rank() == 0:
        links.save(file, slow, fast)


def _kinds() -> list[str]:
    world, local = _sizes()
    return [kind for kind, is_there in (("within", local > 1), ("between", world > local)) if is_there]


def _sizes() -> tuple[int, int]:
    """Return how many ranks there are, and how many of them on this node."""
    return int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _neighbours(kind: str, rank: int) -> list[tuple[int, int]]:
    """Return whom ``rank`` sends to and receives from at once: the next ones of its node, or its like on the next."""
    world, local = _sizes()
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

    def mean(sent: torch.Tensor, received: torch.Tensor) -> float:
        seconds = 0.0
        for call in range(CALLS):
            compute()
            if not on_cpu:
                torch.cuda.synchronize()
            began = time.perf_counter()
            works = []
            for number, (target, source) in enumerate(neighbours):
                works.append(dist.P2POp(dist.irecv, received[call, number], source))
                works.append(dist.P2POp(dist.isend, sent[call, number], target))
            for work in dist.batch_isend_irecv(works):
                work.wait()
            if not on_cpu:
                torch.cuda.synchronize()
            seconds += time.perf_counter() - began
        return seconds / CALLS

    def rounds(length: int) -> list[float]:
        sent, received = (
            torch.zeros(CALLS, len(neighbours), length, dtype=torch.uint8, device=device) for _ in range(2)
        )
        return [mean(sent, received) for _ in range(ROUNDS + 1)][1:]

    length = ((2 if on_cpu else 32) << 20) // len(neighbours)
    latencies, of_large = rounds(8), rounds(length)
    sharing = 1 if kind == "within" else _sizes()[1]
    latency = statistics.median(latencies)
    return [sharing * length * len(neighbours) / max(each - latency, 0.1 * each) for each in of_large], latencies
