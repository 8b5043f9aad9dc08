"""A test of the links between the ranks of a job that torchrun has started: two by themselves, and all at once."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from zerosync_strategy.tools import links
from zerosync_strategy.tools.doctor.findings import Finding, Topic
from zerosync_strategy.tools.links import Links

TOPIC = Topic("link")
_WORDS = {"within": "within a node", "between": "between nodes"}
SLOW = 0.7
"""A link below this part of the speed that was assumed is worth a warning."""
LATE = 3.0
"""So is one whose latency is above so many times what was assumed."""
PINGS, SENDS = 50, 5
TIMEOUT = timedelta(seconds=60)
ROUNDS, CALLS = 7, 24
COMPUTED = 3e-3
"""Seconds that a rank computes between two calls of a round, on CPU."""
PEERS = 8
"""Ranks that a rank exchanges with at once in a round, at most."""


@dataclass(frozen=True)
class Measured:
    """One kind of link, between two ranks that send to each other at once.

    Attributes:
        kind: ``"within"`` a node, or ``"between"`` nodes.
        bandwidth: bytes per second in each direction.
        latency: seconds for a message of 8 bytes.
    """

    kind: str
    bandwidth: float
    latency: float


def is_job() -> bool:
    """Whether torchrun, or a launcher that sets the same variables, has started this process beside others."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1 and "MASTER_ADDR" in os.environ


def check(
    assumed: Links,
    nbytes: int = 32 << 20,
    progress: Callable[[str], None] = lambda _: None,
    saved_to: Path | None = None,
) -> list[Finding]:
    """Measure the links of this job, on every rank of it, and compare with what a plan assumes.

    Args:
        assumed: the speeds to compare with.
        nbytes: of one message of the test of bandwidth.
        progress: called with what is measured next.
        saved_to: rank 0 writes there what ``zerosync plan --links`` reads.

    Returns:
        What rank 0 found; on other ranks nothing.
    """
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available() and dist.is_nccl_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    device = torch.device("cuda" if on_gpu else "cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT)
    try:
        measured = []
        for kind in _kinds():
            progress(_WORDS[kind])
            measured.append(_measure(kind, nbytes, device))
            dist.barrier()
        progress("all ranks")
        everyone = _all_gather(nbytes, device) * 8 / 1e9
        if saved_to is not None:
            save(saved_to, device)
        said = f"all {dist.get_world_size()} ranks gathering at once, {dist.get_backend()}:"
    finally:
        dist.destroy_process_group()
    if int(os.environ["RANK"]):
        return []
    return [*_findings(measured, assumed), TOPIC.note(f"{said} each sends {everyone:.3g} Gbit/s")]


def _findings(measured: list[Measured], assumed: Links) -> Iterator[Finding]:
    if not measured:
        yield TOPIC.error("the job has a single rank", "Start two or more with torchrun.")
    for each in measured:
        speed, latency = getattr(assumed, each.kind), getattr(assumed, f"latency_{each.kind}")
        found, late = f"{each.bandwidth * 8 / 1e9:.3g}", f"{each.latency * 1e6:.0f}"
        text = (
            f"{_WORDS[each.kind]}: {found} Gbit/s, {late} us; a plan assumes {speed * 8 / 1e9:.3g} Gbit/s,"
            f" {latency * 1e6:.0f} us"
        )
        remedies = [f"--{each.kind} {found}Gbit/s"] if each.bandwidth < SLOW * speed else []
        remedies += [f"--latency-{each.kind} {late}us"] if each.latency > LATE * latency else []
        if remedies:
            remedy = f"Plan with {' '.join(remedies)}, or look for the reason of the difference."
            yield TOPIC.warning(text, remedy)
        else:
            yield TOPIC.ok(text)


def _sizes() -> tuple[int, int]:
    """Return how many ranks there are, and how many of them on this node."""
    return int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _kinds() -> list[str]:
    """Return which kinds of links this job has: within a node, between nodes."""
    world, local = _sizes()
    return [kind for kind, is_there in (("within", local > 1), ("between", world > local)) if is_there]


def _seconds_of(call: Callable[[], object], device: Any) -> float:
    import torch

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    synchronize()
    began = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - began


def _median(call: Callable[[], object], device: Any, rounds: int) -> float:
    """Return the median seconds of ``rounds`` calls, after one that is not counted."""
    call()
    return statistics.median(_seconds_of(call, device) for _ in range(rounds))


def _exchange(pairs: Sequence[tuple[Any, int, Any, int]]) -> None:
    """Send and receive at once: of each pair, what to send to which rank, and where to receive from which.

    As ZeroSync's own exchanges; with the sends first, gloo's two directions may take turns.
    """
    import torch.distributed as dist

    works = []
    for sent, target, received, source in pairs:
        works += [dist.P2POp(dist.irecv, received, source), dist.P2POp(dist.isend, sent, target)]
    for work in dist.batch_isend_irecv(works):
        work.wait()


# ---- two ranks by themselves, and an all-gather of all ---------------------------------------------------------------


def _measure(kind: str, nbytes: int, device: Any) -> Measured:
    """Send between rank 0 and its neighbour, or its like on the next node; others return with nothing measured."""
    import torch
    import torch.distributed as dist

    rank, peer = dist.get_rank(), 1 if kind == "within" else _sizes()[1]
    if rank not in (0, peer):
        return Measured(kind, 0.0, 0.0)
    other = peer if rank == 0 else 0
    small = torch.zeros(1, dtype=torch.int64, device=device)
    large, received = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))

    def ping() -> None:
        for is_my_turn in (rank == 0, rank != 0):
            (dist.send if is_my_turn else dist.recv)(small, other)

    latency = _median(ping, device, PINGS) / 2  # first: nothing is left in a queue
    seconds = _median(partial(_exchange, [(large, other, received, other)]), device, SENDS)
    return Measured(kind, nbytes / seconds, latency)


def _all_gather(nbytes: int, device: Any) -> float:
    """Return the bytes per second that each rank sends in an all-gather of all ranks."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size()
    part = torch.zeros(max(1, nbytes // world), dtype=torch.uint8, device=device)
    whole = torch.zeros(world * len(part), dtype=torch.uint8, device=device)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 deprecates the latter
    return len(part) * (world - 1) / _median(lambda: gather(whole, part), device, SENDS)


# ---- as training meets them: all ranks at once, on CPU after a little computation each time --------------------------


def save(file: Path, device: Any) -> None:
    """Measure on all ranks of a process group, and write what a plan is to assume, on rank 0.

    Bandwidth is what a rank sends within its node, or a node to others; latency that of an exchange of 8 bytes. Both
    are means of the calls of a round; the file has the quartiles of the rounds.
    """
    import torch.distributed as dist

    slow: dict[str, float] = {}
    fast: dict[str, float] = {}
    for kind in _kinds():
        bandwidths, latencies = _measure_all(kind, device)
        (low, _, high), (short, _, long) = statistics.quantiles(bandwidths), statistics.quantiles(latencies)
        slow |= {kind: low, f"latency_{kind}": long}
        fast |= {kind: high, f"latency_{kind}": short}
    if dist.get_rank() == 0:
        links.save(file, slow, fast)


def _neighbours(kind: str, rank: int) -> list[tuple[int, int]]:
    """Return whom ``rank`` sends to and receives from at once: the next ones of its node, or its like on the next."""
    world, local = _sizes()
    node, index = divmod(rank, local)
    if kind == "within":
        steps = range(1, min(local - 1, PEERS) + 1)
        return [(node * local + (index + i) % local, node * local + (index - i) % local) for i in steps]
    steps = range(1, min(world // local - 1, PEERS) + 1)
    return [((rank + i * local) % world, (rank - i * local) % world) for i in steps]


def _measure_all(kind: str, device: Any) -> tuple[list[float], list[float]]:
    """Return the bandwidths and the latencies of the rounds.

    Memory is not in a cache. A rank on CPU that computes has not the core that it shares with the threads that send,
    and some ranks come later than others, as in training. Messages are of the size of ZeroSync's: 2 MiB on gloo.
    """
    import torch
    import torch.distributed as dist

    neighbours = _neighbours(kind, dist.get_rank())
    on_cpu = device.type == "cpu"
    computed = torch.zeros(1 << 18)

    def seconds_of_call(sent: torch.Tensor, received: torch.Tensor) -> float:
        until = time.perf_counter() + COMPUTED
        while on_cpu and time.perf_counter() < until:
            computed.add_(1)
        peers = enumerate(neighbours)
        pairs = [(sent[number], target, received[number], source) for number, (target, source) in peers]
        return _seconds_of(partial(_exchange, pairs), device)

    def rounds(length: int) -> list[float]:
        sent, received = (
            torch.zeros(CALLS, len(neighbours), length, dtype=torch.uint8, device=device) for _ in range(2)
        )
        means = [statistics.fmean(map(seconds_of_call, sent, received)) for _ in range(ROUNDS + 1)]
        return means[1:]

    length = ((2 if on_cpu else 32) << 20) // len(neighbours)
    latencies, of_large = rounds(8), rounds(length)
    sharing = 1 if kind == "within" else _sizes()[1]
    latency = statistics.median(latencies)
    return [sharing * length * len(neighbours) / max(each - latency, 0.1 * each) for each in of_large], latencies
