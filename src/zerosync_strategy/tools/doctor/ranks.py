"""The doctor's tests on several ranks: a self-test on the CPU, and what the GPUs of this machine do together.

Each rank is a process on this machine (``on_rank.py``). Their store outlives every one of them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from signal import Signals
from typing import IO, Any

from zerosync_strategy.tools.doctor.findings import Finding, of_topic

PROGRAM = "zerosync_strategy.tools.doctor.on_rank"
_LOOK = 0.1  # seconds between two looks at the ranks
_GRACE = 5.0  # seconds in which the others may end after one has failed, and say why
_ERROR = re.compile(r"\w+Error: .*")


class Ranks:
    """``python -m program DEVICE PART ...`` on ``count`` ranks: a context, at whose end no rank is left.

    Args:
        device: ``"cpu"``, or ``"cuda"``, where each rank has a GPU of its own.
        parts: which of :mod:`on_rank`'s parts to run.
    """

    def __init__(self, device: str, parts: Sequence[str], count: int, program: str = PROGRAM) -> None:
        self._command = [sys.executable, "-u", "-m", program, device, *parts]
        self._device, self.count = device, count
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[IO[Any]] = []
        self._left = ExitStack()

    def __enter__(self) -> Ranks:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # As torchrun does: were it one of the ranks, its end would be that of all.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "WORLD_SIZE": str(self.count),
            "LOCAL_WORLD_SIZE": str(self.count), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1",
            **({"CUDA_VISIBLE_DEVICES": ""} if self._device == "cpu" else {}),
        }  # fmt: skip
        with ExitStack() as left:
            left.callback(self._end)
            for rank in range(self.count):
                log = left.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=os.environ | common | own
                )
                self._logs.append(log)
                self._processes.append(process)
            self._left = left.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            with suppress(BrokenPipeError):
                process.communicate()

    def said(self, rank: int) -> str:
        """Return all that a rank has printed so far."""
        log = self._logs[rank]
        return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode(errors="replace")

    def wake(self, rank: int) -> None:
        """Let a rank go on that reads a line."""
        pipe = self._processes[rank].stdin
        assert pipe is not None
        pipe.write(b"\n")
        pipe.flush()

    def wait(self, seconds: float) -> str:
        """Wait until all ranks have ended. Return what is wrong, with a rank's error; empty if all ended well."""
        deadline = time.monotonic() + seconds
        failed = False
        while any(process.poll() is None for process in self._processes):
            if not failed and any(process.returncode for process in self._processes):
                failed, deadline = True, min(deadline, time.monotonic() + _GRACE)
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK)
        ended = [process.poll() for process in self._processes]
        bad = [rank for rank, status in enumerate(ended) if status]
        if not bad and None not in ended:
            return ""
        return self._with_error(self._end_of(bad[0]) if bad else f"not ended after {seconds:g} s")

    def wait_until(self, holds: Callable[[int], bool], ranks: Sequence[int], seconds: float) -> tuple[float, str]:
        """Wait until something ``holds`` for each of ``ranks``, before it ends.

        Returns:
            The seconds that took, and what went wrong; empty if it holds.
        """
        began = time.monotonic()
        while True:
            ended = [rank for rank in ranks if self._processes[rank].poll() is not None]  # first: then all is said
            missing = [rank for rank in ranks if not holds(rank)]
            waited = time.monotonic() - began
            if not missing:
                return waited, ""
            if dead := [rank for rank in missing if rank in ended]:
                return waited, self._with_error(self._end_of(dead[0]))
            if waited > seconds:
                return waited, self._with_error(f"rank {missing[0]} said nothing for {seconds:g} s")
            time.sleep(_LOOK)

    def _end_of(self, rank: int) -> str:
        status = self._processes[rank].returncode
        return f"rank {rank} ended " + (f"with status {status}" if status >= 0 else f"by {Signals(-status).name}")

    def _with_error(self, problem: str) -> str:
        """Append the first error that a rank has printed; first of those that have ended badly."""
        ranks = sorted(range(self.count), key=lambda rank: not self._processes[rank].returncode)
        errors = (_ERROR.search(self.said(rank)) for rank in ranks)
        error = next(filter(None, errors), None)
        return problem + (f", {error[0][:300]}" if error else "")


# ---- on the CPU: training against plain torch ------------------------------------------------------------------------


REMEDY = "If the versions above are right, report it with `zerosync doctor --json`."
_passed, _, _, _failed = of_topic("self-test")


def self_test(timeout: float = 180.0) -> Finding:
    """Train on two ranks in separate processes, on stages 1, 2 and 3, for at most ``timeout`` seconds."""
    with Ranks("cpu", ["correct"], 2) as ranks:
        problem = ranks.wait(timeout)
    if problem:
        return _failed(f"two ranks: {problem}", REMEDY)
    return _passed("two ranks, stages 1, 2 and 3: parameters equal plain torch's, one reduction per step")


# ---- on GPUs: right steps, bandwidth, a small step, and names of ranks that fail -------------------------------------


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


def visible_gpus() -> int:
    """Return the number of GPUs that torch sees; 0 without torch, which ``installation.py`` reports."""
    try:
        import torch
    except ImportError:
        return 0

    return torch.cuda.device_count()


def no_gpus() -> Finding:
    """Return the finding of a machine without GPUs."""
    import torch

    built = f"torch {torch.__version__}" + (
        "" if torch.version.cuda or torch.version.hip else ", which is built for CPUs"
    )
    return warning(
        f"no GPU is visible to {built}: the self-test runs on the CPU",
        "Look at nvidia-smi, CUDA_VISIBLE_DEVICES and the container's --gpus, and install torch for CUDA.",
    )


def check_gpus(ranks: int, device: str = "cuda", program: str = PROGRAM) -> Iterator[Finding]:
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
