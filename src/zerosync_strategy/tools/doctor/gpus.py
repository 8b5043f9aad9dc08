"""What the GPUs of this machine do together: right steps, bandwidth, a small step, and names of ranks that fail."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from zerosync_strategy.tools.doctor.findings import Finding, of_topic
from zerosync_strategy.tools.doctor.ranks import PROGRAM, Ranks
from zerosync_strategy.tools.doctor.selftest import REMEDY

ok, note, warning, error = of_topic("gpus")
TRAIN_SECONDS, START_SECONDS, FAULT_SECONDS = 60.0, 30.0, 45.0
"""For training and measurements; until the ranks of the faults train; and until they name a rank, twice: 3 minutes."""
SLOW = {"cuda": 5e9, "cpu": 0.0}
"""Bytes per second of the larger message, below which the way between two GPUs is not that of PCIe, nor NVLink."""
_LINKS = (
    "`nvidia-smi topo -m` shows the links, and NCCL_DEBUG=INFO which way NCCL takes. Usual causes: NCCL_P2P_DISABLE,"
    " PCIe's access control (ACS) in a virtual machine, a small /dev/shm."
)
_FAULTS = {
    "stuck": r"Verdict: rank {} is ",
    "killed": r"Verdict: rank {} has ended",
}


def visible() -> int:
    """Return the number of GPUs that torch sees; 0 without torch, which ``installation.py`` reports."""
    try:
        import torch
    except ImportError:
        return 0

    return torch.cuda.device_count()


def none_found() -> Finding:
    """Return the finding of a machine without GPUs."""
    import torch

    built = f"torch {torch.__version__}" + (
        "" if torch.version.cuda or torch.version.hip else ", which is built for CPUs"
    )
    return warning(
        f"no GPU is visible to {built}: the self-test runs on the CPU",
        "Look at nvidia-smi, CUDA_VISIBLE_DEVICES and the container's --gpus, and install torch for CUDA.",
    )


def check(ranks: int, device: str = "cuda", program: str = PROGRAM) -> Iterator[Finding]:
    """Yield the findings of as many ranks, each on a GPU of its own, within three minutes.

    Args:
        device: ``"cpu"`` lets processes of the CPU stand in for GPUs; its times mean nothing.
        program: what each rank runs: :mod:`on_rank`, or what calls it.
    """
    alone = ranks == 1
    parts = ["correct", "step"] if alone else ["correct", "bandwidth", "step"]
    with Ranks(device, parts, ranks, program) as job:
        problem = job.wait(TRAIN_SECONDS)
        said = job.said(0)
    found = [json.loads(text) for text in re.findall(r"^doctor measured (.*)$", said, re.MULTILINE)]
    of_ranks = f"{ranks} rank{'s' * (not alone)}"
    if problem and not found:
        yield error(f"{of_ranks}: {problem}", REMEDY)
        return
    yield ok(f"{of_ranks}, stages 1, 2 and 3: parameters equal plain torch's, one reduction per step")
    yield from _bandwidths([each for each in found if each["part"] == "bandwidth"], SLOW[device])
    for each in found:
        if each["part"] == "step":
            yield _step(each)
    if problem:
        yield error(f"{of_ranks}, in the measurements: {problem}", REMEDY)
    elif alone:
        yield note(
            "one GPU: it sends nothing, so neither bandwidth nor a rank that fails was tested", "Use two or more."
        )
    else:
        yield from _faults(ranks, device, program)


def _bandwidths(found: list[dict[str, Any]], slow: float) -> Iterator[Finding]:
    for name in dict.fromkeys(each["collective"] for each in found):
        rates = {each["nbytes"]: each["rate"] for each in found if each["collective"] == name}
        words = ", ".join(f"{rate / 1e9:.3g} GB/s at {nbytes >> 20} MiB" for nbytes, rate in rates.items())
        fine = rates[max(rates)] >= slow
        yield (ok if fine else warning)(f"{name:14} {words} (bus bandwidth)", "" if fine else _LINKS)


def _step(found: dict[str, Any]) -> Finding:
    spent, compute = (1e3 * found[each] for each in ("seconds", "compute"))
    exposed = max(0.0, spent - compute)
    what = f"{found['parameters'] / 1e6:.3g} M parameters in bf16, one backward of {found['rows']} rows"
    words = f"a small step on stage {found['stage']} ({what}): {spent:.3g} ms, {exposed:.3g} ms more than plain torch's"
    if exposed <= compute:
        return ok(words)
    return note(words, "Larger micro-batches, or more of them in a step, hide more of it.")


def _faults(ranks: int, device: str, program: str) -> Iterator[Finding]:
    """Yield whether the other ranks name the last one where it is stuck, and where it was killed."""
    chosen, others = ranks - 1, range(ranks - 1)
    with Ranks(device, ["faults"], ranks, program) as job:
        for fault, verdict in _FAULTS.items():
            began = f"doctor: {fault} now"
            _, problem = job.wait_until(lambda rank: began in job.said(rank), [chosen], START_SECONDS)  # noqa: B023
            if problem:
                yield error(f"a {fault} rank: before that, {problem}", REMEDY)
                return
            named = re.compile(verdict.format(chosen)).search
            seconds, problem = job.wait_until(lambda rank: bool(named(job.said(rank))), others, FAULT_SECONDS)  # noqa: B023
            if problem:
                yield error(f"a {fault} rank: not each other rank has named rank {chosen}: {problem}", REMEDY)
                return
            yield ok(f"a {fault} rank: each other rank named rank {chosen} after {seconds:.0f} s")
            if fault == "stuck":
                job.wake(chosen)
