"""A test of the links between the ranks of a job that torchrun has started."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from zerosync_strategy.tools.doctor import exchange
from zerosync_strategy.tools.doctor.findings import Finding, error, note, ok, warning
from zerosync_strategy.tools.links import Links

TOPIC = "link"
_WORDS = {"within": "within a node", "between": "between nodes"}
SLOW = 0.7
"""A link below this part of the speed that was assumed is worth a warning."""
LATE = 3.0
"""So is one whose latency is above so many times what was assumed."""
PINGS, ROUNDS = 50, 5
TIMEOUT = timedelta(seconds=60)


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
    links: Links, nbytes: int = 32 << 20, progress: Callable[[str], None] = lambda _: None, saved_to: Path | None = None
) -> list[Finding]:
    """Measure the links of this job, on every rank of it, and compare with what a plan assumes.

    Args:
        links: the speeds to compare with.
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
        peers = {"within": 1, "between": exchange.sizes()[1]}
        for kind in exchange.kinds():
            progress(_WORDS[kind])
            measured.append(_measure(kind, peers[kind], nbytes, device))
            dist.barrier()
        progress("all ranks")
        everyone = _all_gather(nbytes, device)
        if saved_to is not None:
            exchange.save(saved_to, device)
        backend = dist.get_backend()
    finally:
        dist.destroy_process_group()
    if int(os.environ["RANK"]):
        return []
    return [*_findings(measured, links), note(TOPIC, _said_of_all(everyone, backend))]


def _measure(kind: str, peer: int, nbytes: int, device: Any) -> Measured:
    """Send between rank 0 and ``peer``; other ranks return at once, with nothing measured."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    if rank not in (0, peer):
        return Measured(kind, 0.0, 0.0)
    other = peer if rank == 0 else 0
    small = torch.zeros(1, dtype=torch.int64, device=device)
    large, received = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))

    def send_both_ways() -> None:
        # As ZeroSync's own exchanges; with the sends first, gloo's two directions may take turns.
        both = [dist.P2POp(dist.irecv, received, other), dist.P2POp(dist.isend, large, other)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    def ping() -> None:
        for is_my_turn in (rank == 0, rank != 0):
            (dist.send if is_my_turn else dist.recv)(small, other)

    latency = statistics.median(_timed(ping, device, PINGS)) / 2  # first: nothing is left in a queue
    return Measured(kind, nbytes / statistics.median(_timed(send_both_ways, device, ROUNDS)), latency)


def _all_gather(nbytes: int, device: Any) -> float:
    """Return the bytes per second that each rank sends in an all-gather of all ranks."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size()
    part = torch.zeros(max(1, nbytes // world), dtype=torch.uint8, device=device)
    whole = torch.zeros(world * len(part), dtype=torch.uint8, device=device)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 deprecates the latter
    seconds = _timed(lambda: gather(whole, part), device, ROUNDS)
    return len(part) * (world - 1) / statistics.median(seconds)


def _timed(call: Callable[[], object], device: Any, rounds: int) -> Iterator[float]:
    """Yield the seconds of each of ``rounds`` calls, after one that is not counted."""
    call()
    for _ in range(rounds):
        yield exchange.seconds_of(call, device)


def _findings(measured: list[Measured], links: Links) -> Iterator[Finding]:
    if not measured:
        yield error(TOPIC, "the job has a single rank", "Start two or more with torchrun.")
    for each in measured:
        speed, latency = getattr(links, each.kind), getattr(links, f"latency_{each.kind}")
        text = (
            f"{_WORDS[each.kind]}: {each.bandwidth * 8 / 1e9:.3g} Gbit/s, {each.latency * 1e6:.0f} us; a plan assumes"
            f" {speed * 8 / 1e9:.3g} Gbit/s, {latency * 1e6:.0f} us"
        )
        remedies = []
        if each.bandwidth < SLOW * speed:
            remedies.append(f"--{each.kind} {each.bandwidth * 8 / 1e9:.3g}Gbit/s")
        if each.latency > LATE * latency:
            remedies.append(f"--latency-{each.kind} {each.latency * 1e6:.0f}us")
        if remedies:
            remedy = f"Plan with {' '.join(remedies)}, or look for the reason of the difference."
            yield warning(TOPIC, text, remedy)
        else:
            yield ok(TOPIC, text)


def _said_of_all(bandwidth: float, backend: str) -> str:
    ranks = os.environ["WORLD_SIZE"]
    return f"all {ranks} ranks gathering at once, {backend}: each sends {bandwidth * 8 / 1e9:.3g} Gbit/s"
