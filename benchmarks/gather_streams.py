"""What streams per process group are worth, in simulated time: one rank of 16, in a 4 x 4 mesh, under ZeRO-3.

    python benchmarks/gather_streams.py

Real DeepSpeed runs on the race checker's streams, with a process group that sends nothing. The checker knows what waits
for what; given how long a gather, a copy and a layer take, that is a step time. A gather takes as long as its slowest
link needs for its bytes, and gathers that share a link take turns. Reductions and the optimizer take no time: they are
the same in all columns. Every rank does the same, so one stands for all, and nothing stands for stragglers.

Each block of the model has a layer whose parameters are sharded over all ranks, one over the four ranks of a node (by
the links within it) and one over four ranks of four nodes (by the network).
"""

import multiprocessing
import os
import sys
import warnings
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.harness.racecheck import simulate
from tests.harness.racecheck.checker import Clock, Operation
from zerosync_strategy import prepare_cpu

NODES = PER_NODE = 4
RANKS = NODES * PER_NODE
WIDTH, BLOCKS, STEPS = 64, 6, 5
# A layer stands for one of 4096 x 4096 in bf16. Microseconds, and bytes per microsecond.
LAYER_BYTES = 2 * 4096 * 4096
NETWORK, MEMORY, LATENCY = 50_000, 2_000_000, 20.0
NODE_LINKS = (400_000, 50_000)  # within a node
PRODUCTS = (150.0, 300.0)  # with a layer's matrix; a step has three per layer
PREFETCH = (0, 1, 3, 6)  # layers


class Blocks(nn.Module):
    """Of each three layers, the first belongs to all ranks, the second to a row, the third to a column."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3 * BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def times(system: str, prefetch: int) -> list[dict[str, float]]:
    """For each speed within a node and each cost of a product, the last step. In a process of its own."""
    import deepspeed

    from zerosync_strategy import attach, shard_over

    warnings.filterwarnings("ignore", module="(torch|deepspeed)")
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0", "LOCAL_SIZE": str(PER_NODE)}
    prepare_cpu()
    with simulate() as simulation:
        dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
        deepspeed.init_distributed(dist_init_required=False, verbose=False)
        row = dist.new_group(list(range(PER_NODE)))
        column = dist.new_group(list(range(0, RANKS, PER_NODE)))
        model = Blocks()
        for index in range(0, 3 * BLOCKS, 3):
            shard_over(row, model.layers[index + 1])
            shard_over(column, model.layers[index + 2])
        zero = {
            "stage": 3, "overlap_comm": True, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": prefetch * WIDTH * WIDTH,
        }  # fmt: skip
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters()), dist_init_required=False,
            config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero},
        )  # fmt: skip
        if system != "stock":
            attach(engine, unshard_streams=system)
        gathers, ends = record_gathers(), []
        operations = simulation.operations
        begun = len(operations)
        for _ in range(STEPS):
            engine.backward(engine(torch.randn(4, WIDTH)))
            engine.step()
            ends.append(len(operations) - begun)
    return [
        in_time(operations[begun:], ends, gathers, row.group_name, node, product)
        for node in NODE_LINKS
        for product in PRODUCTS
    ]


def record_gathers() -> dict[str, list[int]]:
    """From now on: how many layers each gather carries, by the name of its process group, in order."""
    from deepspeed.runtime.zero import partition_parameters

    gathers: dict[str, list[int]] = defaultdict(list)
    stock = partition_parameters._dist_allgather_fn

    def gather(source: Any, target: torch.Tensor, group: Any = None) -> Any:
        gathers[group.group_name].append(target.numel() // (WIDTH * WIDTH))
        return stock(source, target, group)

    partition_parameters._dist_allgather_fn = gather
    return gathers


def in_time(
    operations: Any, ends: list[int], gathers: dict[str, list[int]], row: str, node: float, product: float
) -> dict[str, float]:
    """The last step in milliseconds, and the sums of its layers and of its gathers by link."""
    todo = {group: deque(sizes) for group, sizes in gathers.items()}

    def link(operation: Any) -> str | None:
        if not operation.name.startswith("all_gather"):
            return None
        return "node" if operation.timeline.name == f"process group {row}" else "network"

    def cost(operation: Any) -> float:
        if link(operation):
            group = operation.timeline.name.removeprefix("process group ")
            size = todo[group].popleft() * LAYER_BYTES
            ranks = PER_NODE if group != "0" else RANKS
            return LATENCY + size * (ranks - 1) / ranks / (node if group == row else NETWORK)
        if operation.name in ("mm", "addmm"):
            return product
        if operation.name == "cat":  # DeepSpeed packs and unpacks a gather
            return LAYER_BYTES / MEMORY
        return 0.0

    spans = schedule(operations, cost, link)
    before, last = (max(span.end for span in spans[:end]) for end in ends[-2:])
    sums: dict[str, float] = defaultdict(float, step=(last - before) / 1000)
    for span in spans[ends[-2] : ends[-1]]:
        kind = link(span.operation) or ("products" if span.operation.name in ("mm", "addmm") else "copies")
        sums[kind] += (span.end - span.start) / 1000
    return sums


@dataclass(frozen=True)
class Span:
    """An operation with its start and its end."""

    operation: Operation
    start: float
    end: float


def schedule(
    operations: Iterable[tuple[Operation, Clock]],
    cost: Callable[[Operation], float],
    link: Callable[[Operation], str | None],
) -> list[Span]:
    """Schedule ``operations``, those of a simulation, each as early as its dependencies allow.

    Args:
        cost: the duration of an operation.
        link: what an operation occupies, such as a network interface; ``None``: nothing. Operations of one link run one
            after the other, in the order of their issue, on whatever timelines.
    """
    spans = []
    ended: dict[int, tuple[list[int], list[float]]] = {}  # by timeline: the times of its operations, and their ends
    free: dict[str, float] = {}  # by link: the end of its last operation
    for operation, clock in operations:
        here, start = operation.timeline.id, 0.0
        for timeline, time in clock.items():
            times, ends = ended.get(timeline, ([], []))
            index = bisect_right(times, time - (timeline == here)) - 1
            if index >= 0:
                start = max(start, ends[index])
        occupied = link(operation)
        if occupied is not None:
            start = max(start, free.get(occupied, 0.0))
        end = start + cost(operation)
        if occupied is not None:
            free[occupied] = end
        times, ends = ended.setdefault(here, ([], []))
        times.append(operation.time)
        ends.append(max(end, ends[-1] if ends else 0.0))
        spans.append(Span(operation, start, end))
    return spans


def main() -> None:
    """Print a table."""
    cases = [(system, prefetch) for prefetch in PREFETCH for system in ("stock", "shared", "per_group")]
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        found = dict(zip(cases, pool.starmap(times, cases, chunksize=1), strict=True))
    print("| node, GB/s | product, us | prefetch | stock, ms | shared | per group | gain | products | network | node |")
    print("|---:" * 10 + "|")
    for index, (node, product) in enumerate((node, product) for node in NODE_LINKS for product in PRODUCTS):
        for prefetch in PREFETCH:
            stock, shared, own = (found[system, prefetch][index] for system in ("stock", "shared", "per_group"))
            cells = [f"{node / 1000:.0f}", f"{product:.0f}", str(prefetch)]
            cells += [f"{system['step']:.2f}" for system in (stock, shared, own)]
            cells += [f"{stock['step'] / own['step']:.2f}"]
            cells += [f"{own[kind]:.2f}" for kind in ("products", "network", "node")]
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
