"""What a step of a 7 B model costs the host of a rank, against the time of a GPU on paper: where the host is too slow.

    python benchmarks/host_work.py --output benchmarks/results/<date>-host-work

Host work depends on how many modules, parameters and buckets there are, not on how large they are. So the model is
Llama-2-7B's in everything but its widths, which divide among the ranks into whole 16 bytes as Llama's do, its buckets
shrunk with them, and this process is rank 0 of 64 on torch's fake process group. Counted are Python calls, operators
(each that is no view launches a kernel) and collectives. The host's time is the CPU's time of the thread that trains,
the least of several steps: on a GPU a launch takes the place of an operator's arithmetic, which is tiny here. A GPU is
taken to do 0.4 of its peak.

Memory is the most that tensors have at once in a step, optimizer states and all, as multiples of the bytes of the
parameters of one transformer block in bf16.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import multiprocessing
import os
import platform
import pstats
import time
from datetime import date
from pathlib import Path
from typing import Any

from host_cost import OPTIONS, _collectives, _living, _operators, _steps_uncut

SYSTEMS = ("torch", "fsdp2", "stock-2", "zerosync-2", "stock-3", "zerosync-3", "zerosync-3-held")
PARAMETERS = 6_738_415_616  # of Llama-2-7B
PEAK, UTILIZATION, LINK = 989e12, 0.4, 50e9  # of an H100 or H200 in bf16, FLOP/s; 400 Gbit/s for each GPU, bytes/s
REPEATS = 5
AREAS = {
    "hooks of units, and their order": "params/unit params/cache params/held engine/hooks",
    "gathers": "params/issuing params/sources params/scheduler params/shard_groups params/copies engine/gathering"
    " comm/collectives comm/journal comm/streams failures/agreement failures/rank_",
    "states of parameters": "engine/parameter engine/transitions engine/zero3.py engine/param_functions"
    " engine/torch_internals",
    "reads of parameters": "params/",
    "gradients, reductions, communication": "gradients/ failures/misused_gradients comm/",
    "steps, windows and reports": "zerosync_strategy/",
    "DeepSpeed": "/deepspeed/",
    "torch, transformers and Python": "",
}  # by words in paths: the first that fits


def measure(system: str, world_size: int, backwards: int) -> dict[str, Any]:
    """One step of ``backwards`` micro-batches. In a process of its own."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    os.environ["LOCAL_WORLD_SIZE"] = "8"
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=176, num_hidden_layers=32, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=32, use_cache=False,
        )
    ).bfloat16()  # fmt: skip
    parameters, modules = list(model.parameters()), sum(1 for _ in model.modules())
    block = sum(param.nbytes for param in model.model.layers[0].parameters())
    shrunk = sum(param.numel() for param in parameters) / PARAMETERS
    optimizer: Any = torch.optim.AdamW(parameters, lr=1e-4, foreach=True)
    engine: Any = None
    kind, *option = system.split("-")
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        mesh = dist.init_device_mesh("cpu", (world_size,))
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, foreach=True)
    elif kind != "torch":
        import deepspeed

        from zerosync_strategy import attach, prepare_cpu
        from zerosync_strategy.core.comm import nodes

        prepare_cpu()
        nodes.LEAST, nodes.LEAST_OF_RANK = (int(nbytes * shrunk) for nbytes in (nodes.LEAST, nodes.LEAST_OF_RANK))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        sizes = {
            "reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8, "stage3_prefetch_bucket_size": 5e7,
            "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9, "sub_group_size": 1e9,
        }  # fmt: skip
        zero = {name: max(2, 2 * int(size * shrunk / 2)) for name, size in sizes.items()}  # even, as ZeRO-2 wants
        zero |= {"stage": int(option[0]), "overlap_comm": True, "stage3_param_persistence_threshold": 1000}
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero,
                "gradient_accumulation_steps": backwards if kind == "stock" else 1,
                "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
            },
        )  # fmt: skip
        if kind == "zerosync":
            attach(engine, **OPTIONS.get("-".join(option), {}))
    tokens = torch.ones(1, 8, dtype=torch.int64)

    def step() -> None:
        for k in range(backwards):
            if kind == "fsdp2":
                model.set_requires_gradient_sync(k == backwards - 1)
            loss = (engine or model)(input_ids=tokens, labels=tokens).loss
            if engine is None:
                loss.backward()
                continue
            engine.backward(loss)
            if kind == "stock" or k == backwards - 1:
                engine.step()
        if engine is None:
            optimizer.step()
            optimizer.zero_grad()

    with _steps_uncut():
        for _ in range(3):
            step()
        times = []
        for _ in range(REPEATS):
            began = time.thread_time()
            step()
            times.append(time.thread_time() - began)
        with _operators() as operators:
            step()
        with _living() as living:
            step()
        with _collectives(engine) as collectives:
            step()
        profile = cProfile.Profile()
        profile.enable()
        step()
        profile.disable()
    return {
        "system": system, "backwards": backwards, "world_size": world_size, "modules": modules,
        "tensors": len(parameters), "microseconds": 1e6 * min(times), "operators": operators.count,
        "collectives": {name: traffic.calls for name, traffic in collectives.items()} or operators.collectives,
        "blocks": living.most / block, "python_calls": pstats.Stats(profile).total_calls,  # type: ignore[attr-defined]
        "where": where(pstats.Stats(profile)),
    }  # fmt: skip


def where(stats: pstats.Stats) -> dict[str, int]:
    """Calls by area; those of functions that are built in count where they are called."""
    found = dict.fromkeys(AREAS, 0)
    for (path, *_), (_, calls, _, _, callers) in stats.stats.items():  # type: ignore[attr-defined]
        if path != "~":
            found[_area(path)] += calls
        for (of_caller, *_), (called, *_) in callers.items() if path == "~" else ():
            found[_area(of_caller)] += called
    return found


def _area(path: str) -> str:
    return next(area for area, words in AREAS.items() if not words or any(word in path for word in words.split()))


def tokens_per_micro_batch(microseconds: float, backwards: int) -> float:
    """With so many per micro-batch, the GPU computes as long as the host works: 6 FLOP per parameter and token."""
    return microseconds / 1e6 * PEAK * UTILIZATION / (6 * PARAMETERS) / backwards


def link_seconds(system: str, backwards: int, world_size: int) -> float:
    """On the link in a step: bf16 gradients reduced once, stock's in every backward; what is gathered."""
    kind, *option = system.split("-")
    if kind == "torch":
        return 0.0
    option = option or ["3"]  # FSDP2 gathers alike
    share = (world_size - 1) / world_size
    once = 2 * PARAMETERS * share / LINK
    if option[0] == "2":  # stock reduces by an all-reduce, for each micro-batch
        return once * (2 * backwards + 1 if kind == "stock" else 2)
    gathers = 1 if option[1:] == ["held"] else 2 * backwards  # in each forward and each backward
    return once * (gathers + (backwards if kind == "stock" else 1))


def main() -> None:
    """Measure each system, and print or write a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--backwards", type=int, nargs="+", default=[1, 4], help="micro-batches per step")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--output", type=Path, help="write FILE.json and FILE.md")
    options = parser.parse_args()
    runs = []
    for backwards in options.backwards:
        for system in options.systems:
            with multiprocessing.get_context("spawn").Pool(1) as process:
                runs.append(process.apply(measure, (system, options.ranks, backwards)))
            print(row(runs[-1]), flush=True)
    if options.output:
        write(runs, options.output)


HEAD = (
    "| system | micro-batches | Python calls | operators | collectives | memory, blocks | host, ms"
    " | tokens per micro-batch at which the GPU computes as long | link, ms |"
    "\n|---|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def row(run: dict[str, Any]) -> str:
    """A line of the table."""
    tokens = tokens_per_micro_batch(run["microseconds"], run["backwards"])
    link = 1000 * link_seconds(run["system"], run["backwards"], run["world_size"])
    cells = (
        run["system"], run["backwards"], f"{run['python_calls']:,}", f"{run['operators']:,}",
        sum(run["collectives"].values()), f"{run['blocks']:.1f}",
        f"{run['microseconds'] / 1000:.0f}", f"{tokens:,.0f}", f"{link:,.0f}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def table_of_areas(runs: list[dict[str, Any]]) -> list[str]:
    """Where the calls go with the most micro-batches, by system."""
    most = [run for run in runs if run["backwards"] == max(run["backwards"] for run in runs)]
    lines = [
        f"| Python calls, {most[0]['backwards']} micro-batches | {' | '.join(run['system'] for run in most)} |",
        f"|---|{'---:|' * len(most)}",
    ]
    return lines + [f"| {area} | {' | '.join(format(run['where'][area], ',') for run in most)} |" for area in AREAS]


def write(runs: list[dict[str, Any]], path: Path) -> None:
    """The runs, and what they were measured with."""
    import deepspeed
    import torch
    import transformers
    from output import command, processor

    versions = {"torch": torch.__version__, "deepspeed": deepspeed.__version__,
                "transformers": transformers.__version__, "python": platform.python_version()}  # fmt: skip
    record = {"date": str(date.today()), "command": command(), "versions": versions, "cpu": processor(), "runs": runs}
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    lines = [
        f"# {record['date']}: host work of a step at the shape of 7 B parameters, one of {runs[0]['world_size']} ranks",
        "",
        f"Llama-2-7B's {runs[0]['modules']} modules and {runs[0]['tensors']} parameters, narrow; bf16, AdamW, a fake"
        f" process group. {record['cpu']}, one thread. {', '.join(f'{name} {of}' for name, of in versions.items())}.",
        "",
        f"    {record['command']}",
        "",
        HEAD,
        *map(row, runs),
        "",
        *table_of_areas(runs),
        "",
        "The fake group copies what is gathered once for each rank, tensor by tensor: that is in the host's time of"
        " stage 3 (some 450 copies for a gather of seven parameters), and not on a GPU.",
        "",
        f"A GPU of {PEAK / 1e12:.0f} TFLOP/s in bf16 (H100, H200) is taken to do {UTILIZATION} of that, 6 FLOP per"
        f" parameter and token; a link {LINK / 1e9:.0f} GB/s per GPU (400 Gbit/s), stock stage 3 without reuse of what"
        " it has gathered. No GPU was used.",
    ]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
