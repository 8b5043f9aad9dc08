"""What one rank does: build the systems, step them in turn, compare where they end. Started by compare.py."""

from __future__ import annotations

import datetime
import gc
import json
import logging
import os
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hosts import ByteCounter

WARM_UP = 2  # steps of each system that are not counted: ZeRO-3 records its trace in them
RESERVE = 1.5 * 2**30  # bytes of memory that must stay available


def main() -> None:
    """Join the others and do what the plan, the first argument, asks for."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    from zerosync_strategy.core.cpu import prepare_cpu

    prepare_cpu()
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, timeout=datetime.timedelta(minutes=5), verbose=False)
    plan = json.loads(sys.argv[1])
    result = measure(plan["systems"], plan["model"], plan["accumulate"], plan["rounds"])
    if dist.get_rank() == 0:
        Path(plan["result"]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def measure(names: list[str], model: str, accumulate: int, rounds: int) -> dict[str, Any]:
    """Build all systems, let each make a step per round, and compare the parameters at the end."""
    from systems import CONTEXT, make_model, make_system

    rank, world_size = dist.get_rank(), dist.get_world_size()
    initial = {name: param.detach() for name, param in make_model(model).named_parameters()}
    size = sum(param.numel() * param.element_size() for param in initial.values())
    systems = {}
    for name in names:
        systems[name] = make_system(name, model, accumulate)
        _check_memory()
        _say(f"built {name}")
    gc.collect()
    gc.freeze()

    counter = ByteCounter(os.environ["GLOO_SOCKET_IFNAME"])
    seconds: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, list[int]] = {name: [] for name in names}
    reports: dict[str, dict[str, int]] = {}
    for round_ in range(WARM_UP + rounds):
        data = torch.Generator().manual_seed(1000 * round_ + rank)
        batches = [torch.randint(256, (1, CONTEXT), generator=data) for _ in range(accumulate)]
        for name, system in systems.items():
            system.resume()
            before = _read_quiet(counter)
            dist.barrier()
            began = time.perf_counter()
            system.step(batches)
            dist.barrier()
            ended = time.perf_counter()
            after = _read_quiet(counter)
            system.pause()
            reports[name] = system.report()
            if round_ >= WARM_UP:
                seconds[name].append(ended - began)
                sent[name].append(after - before)
            _check_memory()
        label = f"round {round_ - WARM_UP + 1}/{rounds}" if round_ >= WARM_UP else "warm-up"
        last = {name: f"{values[-1] * 1000:.0f}" for name, values in seconds.items() if values}
        _say(f"{label}: " + (", ".join(f"{name} {value}" for name, value in last.items()) + " ms" if last else "done"))

    differences, moved = _compare(systems, initial)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    everything: list[Any] = [None] * world_size
    dist.all_gather_object(everything, (sent, reports, memory))
    shared = os.environ["GLOO_SOCKET_IFNAME"] == "lo"  # every rank has read the counter of all
    return {
        "accumulate": accumulate,
        "parameter_bytes": size,
        "floor_bytes": 2 * size * (world_size - 1) // world_size,
        "peak_memory_bytes": [of_rank[2] for of_rank in everything],
        "moved": moved,
        "systems": {
            name: {
                "seconds": seconds[name],
                "bytes_sent": [
                    values[0] / world_size if shared else sum(values) / world_size
                    for values in zip(*(of_rank[0][name] for of_rank in everything), strict=True)
                ],
                "bytes_sent_by_rank": None if shared else [of_rank[0][name] for of_rank in everything],
                "report": reports[name],
                "peak_unreduced_bytes": max(of_rank[1][name].get("peak_unreduced_bytes", 0) for of_rank in everything),
                "difference": differences[name],
            }
            for name in names
        },
    }


def _read_quiet(counter: ByteCounter) -> int:
    """Read the counter when all that was sent before has been counted."""
    dist.barrier()
    time.sleep(0.02)
    return counter.read()


def _compare(systems: dict[str, Any], initial: dict[str, torch.Tensor]) -> tuple[dict[str, float], float]:
    """Largest difference of any parameter to DDP, or to the first system, and how far training has moved one."""
    reference_name = "ddp" if "ddp" in systems else next(iter(systems))
    reference: dict[str, torch.Tensor] = {}
    differences, moved = {}, 0.0
    for name in (reference_name, *systems):
        largest = 0.0
        for path, param in systems[name].module.named_parameters():
            full = systems[name].full(param)
            if not reference.keys() & {path}:
                reference[path] = full.clone()
                moved = max(moved, (full - initial[path]).abs().max().item())
            largest = max(largest, (full - reference[path]).nan_to_num(torch.inf).abs().max().item())
        over_ranks = torch.tensor(largest)
        dist.all_reduce(over_ranks, dist.ReduceOp.MAX)
        differences[name] = over_ranks.item()
    return differences, moved


def _check_memory() -> None:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    if int(fields["MemAvailable"].split()[0]) * 1024 < RESERVE:
        raise MemoryError("Memory is nearly used up. Compare fewer systems at once: --systems ddp,stock-2,zerosync-2")


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"  {text}", flush=True)


if __name__ == "__main__":
    main()
