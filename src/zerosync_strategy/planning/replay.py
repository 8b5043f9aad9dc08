"""Rank 0 of W, replayed in a process of its own: real DeepSpeed on torch's fake process group, arithmetic left out.

``python -m zerosync_strategy.planning.replay`` reads a job as JSON from its standard input, and writes a line of JSON
for each option set as it is done. It imports once and forks for each.
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
from typing import IO, Any

from zerosync_strategy.planning.jobs import STOCK, OptionSet, Workload
from zerosync_strategy.planning.process import import_all, map_large_blocks

REPLAYED = 3
"""Backwards that are replayed at most; those in the middle of a step are all alike, and counted as the second."""
WARM_UP = 2
"""Steps before the one that is measured; one more where the first finds out what to keep of the parameters."""
PREFIX = "REPLAYED "


def main(job: Mapping[str, Any], out: IO[str]) -> None:
    """Replay each option set of ``job`` in a fork of this process, at most ``job["processes"]`` at once."""
    _import_for_all_forks()
    running: set[int] = set()
    for index in range(len(job["sets"])):
        while len(running) >= job["processes"]:
            running.discard(os.wait()[0])
        if (pid := os.fork()) == 0:
            try:
                _one(job, index, out)
            finally:
                os._exit(0)
        running.add(pid)
    while running:
        running.discard(os.wait()[0])


def _import_for_all_forks() -> None:
    import deepspeed  # noqa: F401
    import torch

    from zerosync_strategy import prepare_cpu

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    prepare_cpu()
    import_all()


def _one(job: Mapping[str, Any], index: int, out: IO[str]) -> None:
    began = time.perf_counter()
    try:
        workload = Workload(**{**job["workload"], "batch": tuple(job["workload"]["batch"])})
        options = OptionSet(**job["sets"][index])
        found = _compute(workload) if options.system == "compute" else replay(workload, options, **job["cluster"])
    except BaseException as problem:
        found = {"error": f"{type(problem).__name__}: {problem}", "traceback": traceback.format_exc()}
    found["replay_seconds"] = time.perf_counter() - began
    os.write(out.fileno(), f"{PREFIX}{json.dumps({'index': index, **found})}\n".encode())  # in one piece


def replay(workload: Workload, options: OptionSet, ranks: int, backend: str) -> dict[str, Any]:
    """Train a few steps as rank 0 of ``ranks``, and return what the last one sent and held.

    Returns:
        ``collectives``: by kind ``[calls, bytes]``; ``peak``: allocated bytes by kind at the moment of the
        most; ``resident``: the same of memory that was written to; ``parameters``: their number; ``options``: in force.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from zerosync_strategy.planning.memory import Ledger
    from zerosync_strategy.planning.skipped import SkippedCompute

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    if backend == "gloo":
        dist.get_backend_config = lambda group=None: "cpu:gloo"  # by this ZeroSync chooses how to send
    map_large_blocks()
    ledger = Ledger()
    with SkippedCompute(ledger.see):
        return _steps(workload, options, ledger)


def _steps(workload: Workload, options: OptionSet, ledger: Any) -> dict[str, Any]:
    import deepspeed
    import torch

    from zerosync_strategy import attach
    from zerosync_strategy.core.comm.traffic import CollectiveCounter
    from zerosync_strategy.core.engine.resident import resident
    from zerosync_strategy.planning.models import build, loss_of

    backwards = min(workload.micro_batches, REPLAYED)
    module, batch = build(workload)
    numel = sum(param.numel() for param in module.parameters())
    nbytes = sum(param.numel() * param.element_size() for param in module.parameters())
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=getattr(torch.optim, workload.optimizer)(module.parameters(), lr=1e-4),
        config=_configuration(workload, options, backwards),
        dist_init_required=False,
    )
    in_force = dict(options.options)
    match in_force.get("param_memory_budget"):
        case float(part):
            in_force["param_memory_budget"] = int(part * nbytes)
        case {"device": float(part), **others}:
            in_force["param_memory_budget"] = {"device": int(part * nbytes), **others}
    zerosync = None if options.system == STOCK else attach(engine, **in_force)
    for param in module.parameters():
        param.register_post_accumulate_grad_hook(_noting_gradients(ledger))
    gc.collect()
    with CollectiveCounter() as counter:
        finds_out = in_force.get("param_memory_budget", 0) not in (0, "all")
        for to_come in range(WARM_UP + finds_out, -1, -1):
            ledger.classify(resident(engine))
            ledger.restart()
            counter.take()
            parts, before = [], engine.skipped_steps
            for _ in range(1 if to_come and zerosync is not None else backwards):
                loss = loss_of(engine, batch)
                engine.backward(loss if zerosync is None else loss / backwards)
                del loss
                if zerosync is None and not engine.is_gradient_accumulation_boundary():
                    engine.step()
                parts.append(dict(counter.take()))
            engine.step()
            parts.append(dict(counter.take()))
            if engine.skipped_steps != before:
                raise RuntimeError("the replayed step was skipped; its gradients were not finite")
    repeated = [parts[1]] * (workload.micro_batches - backwards) if len(parts) > 2 else []
    return {
        "collectives": _total([*parts, *repeated]),
        "peak": ledger.allocated.peak,
        "resident": ledger.written.peak,
        "parameters": numel,
        "options": in_force,
    }


def _configuration(workload: Workload, options: OptionSet, backwards: int) -> dict[str, Any]:
    given = {name: value for name, value in workload.deepspeed.items() if name != "zerosync"}
    zero = {**given.pop("zero_optimization", {}), "stage": options.stage}
    for name in ("train_batch_size", "optimizer", "scheduler", "fp16"):
        given.pop(name, None)
    return {
        "gradient_clipping": 0.0,
        **given,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": backwards if options.system == STOCK else 1,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": workload.dtype == "bf16"},
        "zero_optimization": zero,
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


def _compute(workload: Workload) -> dict[str, Any]:
    """Return the seconds of one forward and backward, and of the optimizer's step, computed here on one thread."""
    import torch

    from zerosync_strategy.planning.models import build, loss_of

    module, batch = build(workload)
    optimizer = getattr(torch.optim, workload.optimizer)(module.parameters(), lr=1e-4)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        loss_of(module, batch).backward()
        between = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append((between - began, time.perf_counter() - between))
    micro_batch, step = (min(part[1:]) for part in zip(*seconds, strict=True))
    return {"micro_batch": micro_batch, "step": step}


def describe(workload: Workload, sets: list[OptionSet], ranks: int, backend: str, processes: int) -> str:
    """Return a job as :func:`main` reads it."""
    cluster = {"ranks": ranks, "backend": backend}
    sets_as_json = [asdict(each) for each in sets]
    return json.dumps({"workload": asdict(workload), "sets": sets_as_json, "cluster": cluster, "processes": processes})


if __name__ == "__main__":
    _results = os.fdopen(os.dup(1), "w")  # what DeepSpeed prints goes to where errors go
    os.dup2(2, 1)
    sys.path.insert(0, os.getcwd())
    main(json.loads(sys.stdin.read()), _results)
