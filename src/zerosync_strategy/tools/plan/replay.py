"""Rank 0 of W, replayed in a process of its own: real DeepSpeed on torch's fake process group, arithmetic left out.

``python -m zerosync_strategy.tools.plan.replay`` reads a pickled :class:`Job` from its standard input, and writes a
line of JSON for each option set as it is done. It imports once and forks for each, and again to time the arithmetic.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from threading import BrokenBarrierError
from typing import IO, Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.engine.cpu import prepare_cpu
from zerosync_strategy.core.engine.inspection import resident
from zerosync_strategy.core.runlog import DataGauge, import_all, map_large_blocks
from zerosync_strategy.tools.plan.jobs import (
    PREFIX,
    REPLAY,
    TIMED,
    Cluster,
    Job,
    LeftOut,
    OptionSet,
    UsageError,
    Workload,
)
from zerosync_strategy.tools.plan.memory import NODE_SHARDS, Ledger
from zerosync_strategy.tools.plan.skipped import SkippedCompute
from zerosync_strategy.tools.plan.training import LevelCounter, Training, join

REPLAYED = 3
"""Backwards that are replayed at most; those in the middle of a step are all alike, and counted as the second."""
WARM_UP = 2
"""Steps before the one that is replayed; one more where the first finds out what to keep of the parameters."""
SETTLING, STEPS = 3, 5
"""Timed steps that do not count, until allocators and the order of ZeRO-3's gathers are settled; and how many do."""


def main(job: Job, out: IO[str]) -> None:
    """Replay each option set of ``job`` in a fork of this process, so many at once.

    Then, where it is to be timed, each with its arithmetic, by as many forks at once as ranks share a machine.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    prepare_cpu()
    import_all()  # for all forks
    running: set[int] = set()
    for index in range(len(job.sets)):
        while len(running) >= job.processes:
            running.discard(os.wait()[0])
        running.add(_fork(lambda index=index: _one(job, index, out)))  # type: ignore[misc]
    while running:
        running.discard(os.wait()[0])
    for index in range(len(job.sets)) if job.at_once else ():
        _together(job, index, out)


def _fork(call: Callable[[], None]) -> int:
    if pid := os.fork():
        return pid
    try:
        call()
    finally:
        os._exit(0)


def _one(job: Job, index: int, out: IO[str]) -> None:
    began = time.perf_counter()
    try:
        found = replay(job.workload, job.sets[index], job.cluster)
    except BaseException as problem:
        found = _failed(problem)
    _write(out, REPLAY, index, {**found, "replay_seconds": time.perf_counter() - began})


def _together(job: Job, index: int, out: IO[str]) -> None:
    """Measure the steps of an option set by ranks that run at once, and wait for one another at each step."""
    fork = get_context("fork")
    barrier, measured = fork.Barrier(job.at_once), fork.SimpleQueue()

    def one() -> None:
        try:
            measured.put(measure_steps(job.workload, job.sets[index], job.cluster, job.threads, barrier.wait))
        except BrokenBarrierError:  # another has failed, and says why
            pass
        except BaseException as problem:
            barrier.abort()
            _write(out, TIMED, index, _failed(problem))

    running = {_fork(one) for _ in range(job.at_once)}
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status:  # it was killed, for its memory perhaps: the others would wait for it
            barrier.abort()
    ranks = []
    while not measured.empty():  # small enough for a pipe, whose writers have ended
        ranks.append(measured.get())
    if len(ranks) == job.at_once:
        _write(out, TIMED, index, {"seconds": [each.seconds for each in ranks], "resident": ranks[0].resident})


def _failed(problem: BaseException) -> dict[str, Any]:
    if isinstance(problem, LeftOut):
        return {"left_out": True}
    is_usage = isinstance(problem, UsageError)
    said = str(problem) if is_usage else f"{type(problem).__name__}: {problem}"
    return {"error": said, "usage": is_usage, "traceback": traceback.format_exc()}


def _write(out: IO[str], kind: str, index: int, found: Mapping[str, Any]) -> None:
    os.write(out.fileno(), f"{PREFIX}{json.dumps({'kind': kind, 'index': index, **found})}\n".encode())  # in one piece


# ---- without the arithmetic: bytes and memory ------------------------------------------------------------------------


def replay(workload: Workload, options: OptionSet, cluster: Cluster) -> dict[str, Any]:
    """Train a few steps as rank 0 of ``cluster``, and return what the last one sent and held.

    Returns:
        ``collectives``: by kind ``[calls, bytes]``; ``peak``: allocated bytes by kind at the moment of the
        most; ``resident``: the same of memory that was written to; ``parameters``: their number; ``by_changes``: of how
        many ``gather_changes`` would gather the changes; ``nbytes_once``: bytes of each gradient and of each trained
        parameter; ``batch``: the shape of a micro-batch; ``options``: in force.
    """
    join(cluster)
    map_large_blocks()
    ledger = Ledger()
    with SkippedCompute(ledger.see):
        training = Training(workload, options, cluster, min(workload.micro_batches, REPLAYED))
        return _steps(training, workload, LevelCounter(cluster), ledger)


def _steps(training: Training, workload: Workload, counter: LevelCounter, ledger: Ledger) -> dict[str, Any]:
    engine, backwards = training.engine, training.backwards
    for param in training.module.parameters():
        param.register_post_accumulate_grad_hook(_noting_gradients(ledger))
    gc.collect()
    with counter:
        finds_out = training.options.get("param_memory_budget", 0) not in (0, "all")
        for to_come in range(WARM_UP + finds_out, -1, -1):
            ledger.classify(resident(engine))
            ledger.restart()
            counter.take()
            parts = []
            for _ in range(1 if to_come and training.zerosync is not None else backwards):
                training.backward(training.forward())
                ledger.classify({NODE_SHARDS: training.node_shards()})
                parts.append(dict(counter.take()))
            by_changes = training.gathered_by_changes()
            training.step()
            parts.append(dict(counter.take()))
    repeated = [parts[1]] * (workload.micro_batches - backwards) if len(parts) > 2 else []
    return {
        "collectives": _total([*parts, *repeated]),
        "peak": ledger.allocated.peak,
        "resident": ledger.written.peak,
        "parameters": training.parameters,
        "by_changes": by_changes,
        "nbytes_once": training.nbytes_once,
        "batch": training.batch,
        "options": training.options,
    }


def _noting_gradients(ledger: Ledger) -> Callable[[Any], None]:
    def note(param: Any) -> None:
        if param.grad is not None:
            ledger.is_gradient(param.grad)

    return note


def _total(parts: list[Mapping[str, Any]]) -> dict[str, list[int]]:
    total: dict[str, list[int]] = {}
    for part in parts:
        for kind, traffic in part.items():
            calls, nbytes = total.get(kind, (0, 0))
            total[kind] = [calls + traffic.calls, nbytes + traffic.bytes]
    return total


# ---- with the arithmetic: time, and the memory of kernels ---------------------------------------------------------


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
    workload: Workload, options: OptionSet, cluster: Cluster, threads: int, wait: Callable[[], object]
) -> Measured:
    """Train a few steps as rank 0 of ``cluster``, nothing sent.

    All that a rank does itself is in them: forward, backward, copies, sums of gradients, the optimizer, host work of
    DeepSpeed and ZeroSync; also the memory that what arrives would be written to. Zeros arrive.

    Args:
        threads: of torch.
        wait: until the ranks that share this machine's cores have come as far.
    """
    torch.set_num_threads(threads)
    join(cluster)
    map_large_blocks()  # as a run that is logged does
    write_received()
    gauge = DataGauge()
    before = gauge.used()
    training = Training(workload, options, cluster, workload.micro_batches)
    seconds, peaks = [], []
    for _ in range(SETTLING + STEPS):
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
    return Measured(seconds[SETTLING:], statistics.median(peaks[SETTLING:]))


def write_received() -> None:
    """Write to what messages would be received into: it takes memory, and what lay there may be no finite number."""
    irecv = dist.irecv

    def receive(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tensor.zero_()
        return irecv(tensor, *args, **kwargs)

    dist.irecv = receive


if __name__ == "__main__":
    _results = os.fdopen(os.dup(1), "w")  # what DeepSpeed prints goes to where errors go
    os.dup2(2, 1)
    sys.path.insert(0, os.getcwd())
    main(pickle.load(sys.stdin.buffer), _results)
