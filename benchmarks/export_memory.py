"""Peak memory of getting all full weights on ZeRO-3: ZeroSync's export beside what DeepSpeed has for it.

    python benchmarks/export_memory.py --output benchmarks/results/<date>-export-memory

Each way runs in processes of its own. Its figure is the most resident memory of rank 0 while it runs, less what the
rank had before.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import json
import multiprocessing
import os
import re
import tempfile
import time
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hosts import LOCAL, variables_of_rank
from output import processor
from systems import make_model

WAYS = {
    "export": "`zerosync.export(directory)`",
    "iterate": "`for name, tensor in zerosync.full_weights()`",
    "consolidated": "DeepSpeed's `_zero3_consolidated_16bit_state_dict()`",
    "save_16bit_model": "DeepSpeed's `save_16bit_model(directory)`",
    "full_parameters": "`zerosync.full_parameters()`, all parameters",
}


def main() -> None:
    """Measure each way, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="35m")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="writes OUTPUT.json and OUTPUT.md")
    options = parser.parse_args()
    found = {way: [measure(way, options, 29800 + k) for k in range(options.repeats)] for way in WAYS}
    nbytes = found["export"][0]["weights"]
    results = {
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/export_memory.py --model {options.model} --ranks {options.ranks}"
        f" --repeats {options.repeats}",
        "cpu": processor(), "cores": os.cpu_count(), "ranks": options.ranks, "model": options.model,
        "versions": {name: version(name) for name in ("zerosync-strategy", "torch", "deepspeed")},
        "weights": nbytes, "ways": found,
    }  # fmt: skip
    text = report(results)
    print(text)
    if options.output:
        options.output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(text)


def measure(way: str, options: argparse.Namespace, port: int) -> dict[str, Any]:
    """Return what rank 0 reports."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            context.Process(target=run, args=(theirs, way, rank, port, directory, options), daemon=True)
            for rank in range(options.ranks)
        ]
        for process in ranks:
            process.start()
        theirs.close()  # so that a rank that has failed ends the wait
        found: dict[str, Any] = ours.recv()
        for process in ranks:
            process.join()
    return found


def run(conductor: Connection, way: str, rank: int, port: int, directory: str, options: Any) -> None:
    """The life of a rank."""
    os.environ |= variables_of_rank([LOCAL] * options.ranks, rank, port)
    import deepspeed
    import torch

    from zerosync_strategy import attach, prepare_cpu

    torch.set_num_threads(1)
    prepare_cpu()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    torch.manual_seed(0)
    model = make_model(options.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True,
        },
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    zerosync = attach(engine) if way in ("export", "iterate", "full_parameters") else None
    weights = sum(param.ds_numel * 4 for param in model.parameters())
    torch.distributed.barrier()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    begin = time.perf_counter()
    if way == "export":
        zerosync.export(directory)
    elif way == "iterate":
        for _ in zerosync.full_weights():
            pass
    elif way == "full_parameters":
        with zerosync.full_parameters():
            pass
    elif way == "consolidated":
        engine._zero3_consolidated_16bit_state_dict()
    else:
        engine.save_16bit_model(directory)
    seconds = time.perf_counter() - begin
    if rank == 0:
        conductor.send({"weights": weights, "peak": memory("VmHWM") - before, "seconds": seconds})
    torch.distributed.barrier()


def memory(name: str) -> int:
    """Bytes of this process by the kernel's count ``name``."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def report(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines = [
        f"# {results['date']}: memory of full weights, {results['model']}, {results['ranks']} ranks",
        "",
        f"ZeRO-3 in fp32, gloo; the weights are {results['weights'] / 1e6:.1f} MB. {results['cpu']}, {results['cores']}"
        f" cores. {versions}.",
        "",
        f"    {results['command']}",
        "",
        "| way | peak above before, MB, rank 0 | of the weights | s |",
        "|---|---:|---:|---:|",
    ]
    for way, runs in results["ways"].items():
        peak, seconds = (sorted(run[key] for run in runs)[len(runs) // 2] for key in ("peak", "seconds"))
        lines.append(f"| {WAYS[way]} | {peak / 1e6:.0f} | {peak / results['weights']:.2f} | {seconds:.2f} |")
    repeats = max(map(len, results["ways"].values()))
    of = "One run each" if repeats == 1 else f"Medians of {repeats} runs"
    return "\n".join([*lines, "", f"{of}; resident memory, by the kernel's count."]) + "\n"


if __name__ == "__main__":
    main()
