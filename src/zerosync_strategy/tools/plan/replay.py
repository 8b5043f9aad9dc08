"""Rank 0 of W, replayed in a process of its own: real DeepSpeed on torch's fake process group, arithmetic left out.

``python -m zerosync_strategy.tools.plan.replay`` reads a job as JSON from its standard input, and writes a line of JSON
for each option set as it is done. It imports once and forks for each; also where the arithmetic is to be timed.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from multiprocessing import get_context
from threading import BrokenBarrierError
from typing import IO, Any

from zerosync_strategy.tools.plan.jobs import Cluster, OptionSet, UsageError, Workload
from zerosync_strategy.tools.plan.timed import measure_steps
from zerosync_strategy.tools.plan.training import Training, join

REPLAYED = 3
"""Backwards that are replayed at most; those in the middle of a step are all alike, and counted as the second."""
WARM_UP = 2
"""Steps before the one that is measured; one more where the first finds out what to keep of the parameters."""
PREFIX = "REPLAYED "
REPLAY, TIMED = "replay", "timed"


def main(job: Mapping[str, Any], out: IO[str]) -> None:
    """Replay each option set of ``job`` in a fork of this process, at most ``job["processes"]`` at once.

    Then, where ``job["timed"]`` says how, each with its arithmetic, by as many forks at once as ranks share a machine.
    """
    _import_for_all_forks()
    running: set[int] = set()
    for index in range(len(job["sets"])):
        while len(running) >= job["processes"]:
            running.discard(os.wait()[0])
        running.add(_fork(lambda index=index: _one(job, index, out)))  # type: ignore[misc]
    while running:
        running.discard(os.wait()[0])
    for index in range(len(job["sets"])) if job["timed"] else ():
        _together(job, index, out)


def _fork(call: Callable[[], None]) -> int:
    if pid := os.fork():
        return pid
    try:
        call()
    finally:
        os._exit(0)


def _import_for_all_forks() -> None:
    import deepspeed  # noqa: F401
    import torch

    from zerosync_strategy import prepare_cpu
    from zerosync_strategy.core.runlog import import_all
    from zerosync_strategy.tools.plan import memory, models, skipped  # noqa: F401

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    prepare_cpu()
    import_all()


def _one(job: Mapping[str, Any], index: int, out: IO[str]) -> None:
    began = time.perf_counter()
    try:
        found = replay(*_described(job, index), **job["cluster"])
    except BaseException as problem:
        found = _failed(problem)
    _write(out, REPLAY, index, {**found, "replay_seconds": time.perf_counter() - began})


def _together(job: Mapping[str, Any], index: int, out: IO[str]) -> None:
    """Measure the steps of an option set by ranks that run at once, and wait for one another at each step."""
    count = min(job["timed"]["at_once"], job["cluster"]["ranks"])
    fork = get_context("fork")
    barrier, measured = fork.Barrier(count), fork.SimpleQueue()

    def one() -> None:
        try:
            given = {**job["cluster"], "threads": job["timed"]["threads"]}
            measured.put(measure_steps(*_described(job, index), wait=barrier.wait, **given))
        except BrokenBarrierError:  # another has failed, and says why
            pass
        except BaseException as problem:
            barrier.abort()
            _write(out, TIMED, index, _failed(problem))

    running = {_fork(one) for _ in range(count)}
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status:  # it was killed, for its memory perhaps: the others would wait for it
            barrier.abort()
    ranks = []
    while not measured.empty():  # small enough for a pipe, whose writers have ended
        ranks.append(measured.get())
    if len(ranks) == count:
        _write(out, TIMED, index, {"seconds": [each.seconds for each in ranks], "resident": ranks[0].resident})


def _described(job: Mapping[str, Any], index: int) -> tuple[Workload, OptionSet]:
    workload = Workload(**{**job["workload"], "batch": tuple(job["workload"]["batch"])})
    return workload, OptionSet(**job["sets"][index])


def _failed(problem: BaseException) -> dict[str, Any]:
    is_usage = isinstance(problem, UsageError)
    said = str(problem) if is_usage else f"{type(problem).__name__}: {problem}"
    return {"error": said, "usage": is_usage, "traceback": traceback.format_exc()}


def _write(out: IO[str], kind: str, index: int, found: Mapping[str, Any]) -> None:
    os.write(out.fileno(), f"{PREFIX}{json.dumps({'kind': kind, 'index': index, **found})}\n".encode())  # in one piece


def replay(workload: Workload, options: OptionSet, ranks: int, backend: str, on_one_node: bool) -> dict[str, Any]:
    """Train a few steps as rank 0 of ``ranks``, and return what the last one sent and held.

    Returns:
        ``collectives``: by kind ``[calls, bytes]``; ``peak``: allocated bytes by kind at the moment of the
        most; ``resident``: the same of memory that was written to; ``parameters``: their number; ``batch``: the shape
        of a micro-batch; ``options``: in force.
    """
    from zerosync_strategy.core.runlog import map_large_blocks
    from zerosync_strategy.tools.plan.memory import Ledger
    from zerosync_strategy.tools.plan.skipped import SkippedCompute

    join(ranks, backend, on_one_node)
    map_large_blocks()
    ledger = Ledger()
    with SkippedCompute(ledger.see):
        return _steps(Training(workload, options, min(workload.micro_batches, REPLAYED)), workload, ledger)


def _steps(training: Training, workload: Workload, ledger: Any) -> dict[str, Any]:
    from zerosync_strategy.core.comm.traffic import CollectiveCounter
    from zerosync_strategy.core.engine.resident import resident

    engine, backwards = training.engine, training.backwards
    for param in training.module.parameters():
        param.register_post_accumulate_grad_hook(_noting_gradients(ledger))
    gc.collect()
    with CollectiveCounter() as counter:
        finds_out = training.options.get("param_memory_budget", 0) not in (0, "all")
        for to_come in range(WARM_UP + finds_out, -1, -1):
            ledger.classify(resident(engine))
            ledger.restart()
            counter.take()
            parts = []
            for _ in range(1 if to_come and training.zerosync is not None else backwards):
                training.backward(training.forward())
                parts.append(dict(counter.take()))
            training.step()
            parts.append(dict(counter.take()))
    repeated = [parts[1]] * (workload.micro_batches - backwards) if len(parts) > 2 else []
    return {
        "collectives": _total([*parts, *repeated]),
        "peak": ledger.allocated.peak,
        "resident": ledger.written.peak,
        "parameters": training.parameters,
        "batch": training.batch,
        "options": training.options,
    }


def _noting_gradients(ledger: Any) -> Callable[[Any], None]:
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


def describe(
    workload: Workload, sets: list[OptionSet], cluster: Cluster, processes: int, timed: dict[str, int] | None
) -> str:
    """Return a job as :func:`main` reads it; ``timed``: ``at_once`` ranks, with so many ``threads``."""
    job = {"workload": asdict(workload), "sets": [asdict(each) for each in sets], "processes": processes}
    given = {
        "ranks": cluster.ranks, "backend": cluster.backend, "on_one_node": cluster.per_node == cluster.ranks
    }  # fmt: skip
    return json.dumps({**job, "cluster": given, "timed": timed})


if __name__ == "__main__":
    _results = os.fdopen(os.dup(1), "w")  # what DeepSpeed prints goes to where errors go
    os.dup2(2, 1)
    sys.path.insert(0, os.getcwd())
    main(json.loads(sys.stdin.read()), _results)
