"""When communication is hidden, by reckoning: a step's timeline on the simulated device, with the times of a GPU.

    python benchmarks/timeline.py --output benchmarks/results/<date>-timeline

The program is that of ``exposed.py --model mlp``, a narrow one, and this process is rank 0 of 64 on torch's fake
process group. The race checker's device knows for each operation what it comes after: earlier ones of its stream, and
what the stream has waited for. Here each also takes a time, so that it ends at the latest end of what it comes after,
plus that time. Operations take what those of the wide model would on a GPU: matrix products at 600 TFLOP/s, as
measured on an H200; others by their bytes at 3 TB/s; collectives 50 us and their bytes at 50 GB/s, one after the other
on each communicator. The host issues each operation 10 us after the one before, or at once with ``--host 0``.

It says what the order of operations allows. What kernels take from each other, and how fast a host is, it does not say.
Communicators have the whole link each, so that what a second one gains is the most that it can. DDP's is reckoned, too:
stage 2 without communication, and a reduction of each layer as the last backward completes it.
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Iterable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

LAYERS, WIDTH, TOKENS, WORLD_SIZE = 8, 64, 8, 64
WIDE, LONG = 4096 // WIDTH, 8192 // TOKENS  # how many times the widths and tokens are of the model that is meant
FLOPS, MEMORY, LINK, LATENCY = 600e12, 3e12, 50e9, 50e-6  # 1/s, bytes/s, bytes/s, s
LAYER_BYTES = 2 * (WIDE * WIDTH) ** 2
# DeepSpeed's defaults, of this model: what is persistent, and what is gathered ahead.
DEFAULTS = {"stage3_param_persistence_threshold": 10**5 // WIDE**2, "stage3_prefetch_bucket_size": 5 * 10**7 // WIDE**2}
RESHARD = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": WIDTH**2}
SYSTEMS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # stage, options, zero_optimization
    "zerosync-2": (2, {}, {}),
    "zerosync-3": (3, {}, DEFAULTS),
    "zerosync-3-held": (3, {"param_memory_budget": "all"}, DEFAULTS),
    # DeepSpeed's defaults are 1e9 elements, of which a model of 7 B has a seventh; here of this model's.
    "zerosync-3-as-7b": (3, {}, {**RESHARD, "stage3_max_reuse_distance": LAYERS * WIDTH**2 // 7}),
    "zerosync-3-as-7b-own": (
        3,
        {"unshard_streams": "own_communicator"},
        {**RESHARD, "stage3_max_reuse_distance": LAYERS * WIDTH**2 // 7},
    ),
    "zerosync-3-resharding": (3, {}, {**RESHARD, "stage3_max_reuse_distance": 0}),
}


def ddp(compute: float, link: float) -> tuple[float, float]:
    """Seconds of a step that computes for ``compute``, and of its collectives."""
    product = 2 * (WIDE * WIDTH) ** 2 * LONG * TOKENS / FLOPS
    reduction = LATENCY + 2 * LAYER_BYTES * (WORLD_SIZE - 1) / WORLD_SIZE / link
    ready = free = 0.0  # the next layer's gradient, and the communicator
    for _ in range(LAYERS):
        ready += 2 * product
        free = max(ready, free) + reduction
    return compute + free - ready, LAYERS * reduction


def measure(system: str, link: float, host: float, backwards: int) -> tuple[float, float, int]:
    """Seconds of a step, of its collectives and how many there are. In a process of its own."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(WORLD_SIZE)}
    os.environ["LOCAL_WORLD_SIZE"] = "8"
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import deepspeed
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tests.harness.racecheck.simulation import Simulation
    from zerosync_strategy import attach, prepare_cpu
    from zerosync_strategy.core.comm import nodes
    from zerosync_strategy.core.gradients import reducer

    class Timed(Simulation):
        """Each operation has an end."""

        def __init__(self) -> None:
            super().__init__("nccl")
            self.now = self.busy = 0.0  # of the host; all collectives
            self.launched = 0
            self._ends: dict[int, tuple[list[int], list[float]]] = {}  # by stream: numbers of operations, their ends
            self._call: Any = None

        def end_of(self, clock: Any) -> float:
            """When all that ``clock`` counts is done."""
            latest = 0.0
            for stream, number in clock.items():
                numbers, ends = self._ends.get(stream, ([], []))
                if place := bisect.bisect_right(numbers, number):
                    latest = max(latest, ends[place - 1])
            return latest

        def _issue(self, timeline: Any, name: str, touched: Iterable[tuple[torch.Tensor, bool]]) -> Any:
            touched = list(touched)
            operation = super()._issue(timeline, name, touched)
            host = self.checker.host
            self.now = max(self.now + host_seconds, self.end_of(host.clock))
            if timeline is host:
                return operation
            took = self._collective(name, touched) if self._active_call else self._operator(name, touched)
            numbers, ends = self._ends.setdefault(timeline.id, ([], []))
            ends.append(max(self.now, self.end_of(timeline.clock)) + took)
            numbers.append(operation.time)
            return operation

        def _collective(self, name: str, touched: list[tuple[torch.Tensor, bool]]) -> float:
            nbytes = max(sum(t.nbytes for t, written in touched if written is on) for on in (True, False))
            passes = 2 if "reduce" in name and "scatter" not in name else 1
            took = passes * nbytes * WIDE**2 * (WORLD_SIZE - 1) / WORLD_SIZE / link
            if self._call is not self._active_call:  # else one of several in a launch
                self.launched += 1
                took += 0 if link == math.inf else LATENCY
            self._call = self._active_call
            self.busy += took
            return took

        def _operator(self, name: str, touched: list[tuple[torch.Tensor, bool]]) -> float:
            tensors = [tensor for tensor, _ in touched]
            if name in ("mm", "addmm"):
                one, other = [tensor for tensor in tensors if tensor.dim() == 2][:2]
                return 2 * one.shape[0] * one.shape[1] * other.shape[1] * WIDE**2 * LONG / FLOPS
            is_activation = any(tensor.numel() == TOKENS * WIDTH for tensor in tensors)
            return sum(t.nbytes for t in tensors) * WIDE * (LONG if is_activation else WIDE) / MEMORY

    host_seconds = host
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stage, options, zero = SYSTEMS[system]
    prepare_cpu()
    nodes.LEAST, nodes.LEAST_OF_RANK = nodes.LEAST // WIDE**2, nodes.LEAST_OF_RANK // WIDE**2
    reducer.SMALL_BYTES //= WIDE**2
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    bucket = int(5e8) // WIDE**2
    zero = {"stage": stage, "overlap_comm": True, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket, **zero}
    with Timed().recording() as device:
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU()) for _ in range(LAYERS))
        net: Any = nn.Sequential(*layers).bfloat16()
        engine, *_ = deepspeed.initialize(
            model=net, optimizer=torch.optim.AdamW(net.parameters()), dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero,
                "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
            },
        )  # fmt: skip
        attach(engine, **options)
        batch = torch.ones(TOKENS, WIDTH, dtype=torch.bfloat16)

        def step() -> float:
            for _ in range(backwards):
                engine.backward(engine(batch).float().square().mean())
            engine.step()
            return max(device.now, device.end_of(device.current.clock))

        for _ in range(4):
            began = step()
        device.busy = device.launched = 0
        return step() - began, device.busy, device.launched


def main() -> None:
    """Reckon each system, and print or write a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--host", type=float, default=10, help="microseconds from one operation's issue to the next")
    parser.add_argument("--links", nargs="+", type=float, default=[LINK / 1e9], help="GB/s of each GPU")
    parser.add_argument("--backwards", nargs="+", type=int, default=[4], help="of a step")
    parser.add_argument("--output", type=Path, help="write FILE.json and FILE.md")
    options = parser.parse_args()

    def reckon(system: str, link: float, backwards: int) -> tuple[float, float, int]:
        with multiprocessing.get_context("spawn").Pool(1) as process:
            return process.apply(measure, (system, link, options.host / 1e6, backwards))

    columns = ("backwards", "link", "system", "step", "compute", "communication", "collectives")  # s, bytes/s
    runs: list[dict[str, Any]] = []
    lines = [
        "| backwards | GB/s | system | step, ms | of DDP's | no communication, ms | communication, ms | collectives |",
        "|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for backwards in options.backwards:
        computes = {system: reckon(system, math.inf, backwards)[0] for system in {"zerosync-2", *options.systems}}
        for link in options.links:
            of_ddp, reductions = ddp(computes["zerosync-2"], 1e9 * link)
            rows: list[tuple[Any, ...]] = [("ddp", of_ddp, computes["zerosync-2"], reductions, LAYERS)]
            for system in options.systems:
                step, busy, count = reckon(system, 1e9 * link, backwards)
                rows.append((system, step, computes[system], busy, count))
            for system, step, compute, busy, count in rows:
                runs.append(
                    dict(zip(columns, (backwards, 1e9 * link, system, step, compute, busy, count), strict=True))
                )
                cells = f"{1e3 * step:.1f} | {step / of_ddp:.2f} | {1e3 * compute:.1f} | {1e3 * busy:.1f} | {count}"
                lines.append(f"| {backwards} | {link:g} | {system} | {cells} |")
    print(*lines, sep="\n")
    if options.output:
        from output import command

        record = {"date": str(date.today()), "command": command(), "runs": runs}
        options.output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
        versions = f"torch {version('torch')}, deepspeed {version('deepspeed')}"
        head = f"# {record['date']}: a step's timeline, reckoned\n\n{versions}.\n\n    {record['command']}\n\n"
        options.output.with_suffix(".md").write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
