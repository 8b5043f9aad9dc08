"""Replays rank 0 of W in its own process: real DeepSpeed on torch's fake process group, without the arithmetic.

``python -m zerosync_strategy.tools.plan.replay`` reads a pickled workload, cluster and option sets from its standard
input, and writes a line of JSON for each completed option set. It imports once, and forks for each option set.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.attached.checkpointing import bytes_to_copy
from zerosync_strategy.core.attached.sharded import ShardedStage
from zerosync_strategy.core.attaching import attach
from zerosync_strategy.core.comm import nodes
from zerosync_strategy.core.comm.journal import Traffic
from zerosync_strategy.core.comm.nodes import Topology
from zerosync_strategy.core.engine import contract, torch_internals, zero
from zerosync_strategy.core.engine.compat import prepare_cpu
from zerosync_strategy.core.engine.engine_state import resident
from zerosync_strategy.core.engine.types import DeepSpeedEngine
from zerosync_strategy.core.handle import ZeroSync
from zerosync_strategy.core.optimizer.problems import kind_of
from zerosync_strategy.core.options import BLOCK
from zerosync_strategy.tools.plan.jobs import STOCK, Cluster, OptionSet, Workload, build, imported, loss_of, preload
from zerosync_strategy.tools.plan.measures import NODE_SHARDS, Ledger, ProcessCounter
from zerosync_strategy.tools.plan.skipped import SkippedCompute

REPLAYED = 3
"""Most backwards that are replayed. Those in the middle of a step are all alike, and counted as the second."""
WARM_UP = 3
"""Steps before the one that is measured: the first ones record the order of gathers and choose what to hold."""
_IMPORTED_LATE = ("deepspeed", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.tensor", "torch.onnx")


def main(workload: Workload, cluster: Cluster, sets: Sequence[OptionSet], out: int) -> None:
    """Replay each option set in a fork of this process, one per CPU at a time."""
    torch.set_num_threads(1)
    prepare_cpu()
    for name in _IMPORTED_LATE:  # once for all forks: it takes seconds
        import_module(name)
    preload(workload)
    gc.freeze()  # so that no fork looks through, and copies, what is imported
    for index, options in enumerate(sets):
        if index >= (os.cpu_count() or 1):
            os.wait()
        if os.fork():
            continue
        try:
            found = replay(workload, options, cluster)
        except BaseException as problem:
            found = {"error": f"{type(problem).__name__}: {problem}"}
        os.write(out, f"{json.dumps({'index': index, **found})}\n".encode())  # one call, so that lines do not mix
        os._exit(0)
    for _ in range(min(len(sets), os.cpu_count() or 1)):
        os.wait()


def replay(workload: Workload, options: OptionSet, cluster: Cluster) -> dict[str, object]:
    """Train a few steps as rank 0 of ``cluster``, and return what the last one sent and held.

    ``peak`` is the memory by kind when the sum is largest; ``copied_bytes`` is host memory. ``nbytes_once`` is the sum
    of the bytes of each gradient, in the dtype of the reduction, and of each trained parameter. The result is empty if
    stock cannot train with the optimizer, because it needs whole parameters.
    """
    _join(cluster)
    ledger = Ledger()
    with SkippedCompute(ledger.see), ledger.following_resizes():
        module, batch = build(workload)
        name = workload.optimizer
        made: Any = imported(name)(module) if ":" in name else getattr(torch.optim, name)(module.parameters(), lr=1e-4)
        if options.system == STOCK and kind_of(made).needs_whole:
            return {}
        params = [(param.numel(), param.nbytes, param.requires_grad) for param in module.parameters()]  # full sizes
        in_force = _in_bytes(options.options, sum(nbytes for _, nbytes, _ in params))
        backwards = min(workload.micro_batches, REPLAYED)
        engine = _engine(workload, options, module, made, backwards)
        handle = None if options.system == STOCK else attach(engine, **{"node_size": cluster.per_node} | in_force)
        parts = _steps(engine, batch, backwards, handle, ledger, cluster)
        reduced, peak = zero.reduction_dtype(engine).itemsize, ledger.peak
        copied_bytes = 0 if handle is None else bytes_to_copy(handle._attached)
    if backwards > 1:
        parts += [parts[1]] * (workload.micro_batches - backwards)
    total: dict[str, Traffic] = {}
    for part in parts:
        for kind, traffic in part.items():
            total[kind] = total.get(kind, Traffic()) + traffic
    return {
        "collectives": {kind: [each.calls, each.bytes, each.between] for kind, each in total.items()},
        "peak": peak,
        "copied_bytes": copied_bytes,
        "parameters": sum(numel for numel, _, _ in params),
        "nbytes_once": sum(nbytes + reduced * numel for numel, nbytes, is_trained in params if is_trained),
        "options": in_force,
        **_units(handle),
    }


def _units(handle: ZeroSync | None) -> dict[str, object]:
    """Return the units of ZeRO-3: the number of modules by class, and the bytes of the largest."""
    stage = None if handle is None else handle._attached.stage
    if not isinstance(stage, ShardedStage):
        return {}
    return {"units": stage.units.counts, "unit_bytes": stage.units.most_bytes}


def _join(cluster: Cluster) -> None:
    """Make the process group of this process, rank 0 of ``cluster``, as on its backend."""
    contract.require(torch_internals.PLAN)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    on_one_node = cluster.per_node == cluster.ranks
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cluster.ranks)
    if cluster.backend == "gloo":
        # These two decide how ZeroSync sends.
        dist.get_backend_config = lambda group=None: "cpu:gloo"
        nodes.on_one_host = lambda process_group: on_one_node


def _in_bytes(options: Mapping[str, object], nbytes: int) -> dict[str, Any]:
    """Return ``options`` with a budget in bytes, if it was given as a part of all parameters, of ``nbytes``."""
    match options.get("param_memory_budget"):
        case float(part):
            return {**options, "param_memory_budget": int(part * nbytes)}
        case {"device": float(part), **others}:
            return {**options, "param_memory_budget": {"device": int(part * nbytes), **others}}
    return dict(options)


def _engine(
    workload: Workload, options: OptionSet, module: torch.nn.Module, optimizer: torch.optim.Optimizer, backwards: int
) -> DeepSpeedEngine:
    import deepspeed

    given: dict[str, Any] = {name: value for name, value in workload.deepspeed.items() if name != BLOCK}
    for name in ("train_batch_size", "optimizer", "scheduler", "fp16"):
        given.pop(name, None)
    config = {
        "gradient_clipping": 0.0,
        **given,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": backwards if options.system == STOCK else 1,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": workload.dtype == "bf16"},
        "zero_optimization": {**given.get("zero_optimization", {}), "stage": options.stage},
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


def _steps(
    engine: DeepSpeedEngine, batch: object, backwards: int, handle: ZeroSync | None, ledger: Ledger, cluster: Cluster
) -> list[Mapping[str, Traffic]]:
    """Train the steps after which they repeat; return what the last step sent in each backward, and in its end."""

    def note(param: torch.Tensor) -> None:
        if param.grad is not None:
            ledger.note_gradient(param.grad)

    for param in filter(lambda param: param.requires_grad, engine.module.parameters()):
        param.register_post_accumulate_grad_hook(note)
    gc.collect()
    parts: list[Mapping[str, Traffic]] = []
    counter = ProcessCounter() if handle is None else handle.counter
    counter.between = Topology(cluster.per_node, dist.group.WORLD).between  # also where an option says otherwise
    with counter if isinstance(counter, ProcessCounter) else nullcontext():
        for to_come in range(WARM_UP, -1, -1):
            ledger.classify(resident(engine))
            ledger.restart()
            counter.take()
            parts = []
            # The step before shows which backward is a step's last, so only warm-up steps before it are shortened.
            for _ in range(1 if to_come > 1 and handle is not None else backwards):
                loss = loss_of(engine, batch)
                engine.backward(loss if handle is None else loss / backwards)
                del loss
                if handle is not None:
                    ledger.classify({NODE_SHARDS: handle._attached.node_shards()})
                elif not engine.is_gradient_accumulation_boundary():
                    engine.step()
                parts.append(dict(counter.take()))
            engine.step()
            report = None if handle is None else handle.report
            parts.append(dict(counter.take() if report is None else report.collectives))
    if engine.skipped_steps:
        raise RuntimeError("a step was skipped: gradients are not finite. Plan with a batch of usual values.")
    return parts


if __name__ == "__main__":
    _results = os.dup(1)  # DeepSpeed's output is redirected to stderr
    os.dup2(2, 1)
    sys.path.insert(0, os.getcwd())
    _workload, _cluster, _sets = pickle.load(sys.stdin.buffer)
    main(_workload, _cluster, _sets, _results)
