"""Plans against runs: bytes, memory and time of real steps, on CPU ranks with gloo.

    python benchmarks/plan_check.py --output benchmarks/results/plan-check

Each run is W processes that train a model of ``plan_models.py`` for a few steps and log them; then the same is planned.
A rank's computation is measured without DeepSpeed, by W processes at once, because they share this machine's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MODELS = ("transformer", "convolutional", "mixture")
SYSTEMS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "2": (2, {}),
    "2-streamed": (2, {"grad_memory_budget": 0}),
    "3": (3, {}),
    "3-held": (3, {"param_memory_budget": "all"}),
    "3-part": (3, {"param_memory_budget": "20MB"}),
}
STEPS, BACKWARDS = 6, 3


def train(model: str, system: str, log: Path) -> None:
    """Train as one rank, and log the steps; as rank 0."""
    import deepspeed
    import torch

    from benchmarks import plan_models
    from zerosync_strategy import attach, prepare_cpu
    from zerosync_strategy.planning.models import loss_of
    from zerosync_strategy.planning.runlog import RunLog

    torch.set_num_threads(1)
    torch.manual_seed(0)
    prepare_cpu()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    warm = torch.nn.Linear(64, 64)
    warm(torch.ones(1, 64)).sum().backward()  # what torch allocates once
    run = RunLog(log if os.environ["RANK"] == "0" else os.devnull)
    stage, options = SYSTEMS[system]
    module, batch = getattr(plan_models, model)()
    batch = tuple(torch.randn_like(each) for each in batch)
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=torch.optim.AdamW(module.parameters(), lr=1e-4), dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
        },
    )  # fmt: skip
    zerosync = attach(engine, **options)
    for _ in range(STEPS):
        for _ in range(BACKWARDS):
            engine.backward(loss_of(engine, batch) / BACKWARDS)
        engine.step()
        run.step(zerosync)
    torch.distributed.barrier()


def compute(model: str, log: Path) -> None:
    """Write the seconds of a micro-batch, forward and backward, without DeepSpeed."""
    import torch

    from benchmarks import plan_models
    from zerosync_strategy.planning.models import loss_of

    torch.set_num_threads(1)
    module, batch = getattr(plan_models, model)()
    seconds = []
    for _ in range(8):
        began = time.perf_counter()
        loss_of(module, batch).backward()
        seconds.append(time.perf_counter() - began)
    log.write_text(str(sorted(seconds[2:])[2]))


def in_ranks(count: int, arguments: list[str], hosts: list[Any]) -> None:
    """Run this file as ``count`` ranks, and wait for them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(count):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        variables |= {"MASTER_ADDR": hosts[0].address if hosts else "127.0.0.1", "MASTER_PORT": port}
        if hosts:
            variables["GLOO_SOCKET_IFNAME"] = hosts[rank].interface
        env = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        env |= {k: str(v) for k, v in variables.items()}
        enter = hosts[rank].enter if hosts else None
        command = [sys.executable, "-W", "ignore", __file__, *arguments]
        ranks.append(subprocess.Popen(command, env=env, preexec_fn=enter, stderr=subprocess.PIPE, text=True))
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=400)
            if process.returncode:
                raise RuntimeError(errors[-3000:])
    finally:
        for process in ranks:
            process.kill()


def main() -> None:
    """Run and plan each combination, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--links", nargs="+", default=["loopback", "1gbit"], help="loopback, or a rate of tc; as root")
    parser.add_argument("--output", type=Path, help="write FILE.json and FILE.md")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        kind, model, *rest = arguments.one
        compute(model, Path(rest[0])) if kind == "compute" else train(model, rest[0], Path(rest[1]))
        return
    from benchmarks.hosts import link, require_namespaces
    from zerosync_strategy.links import Links, parse_speed
    from zerosync_strategy.planning.check import check, read_run
    from zerosync_strategy.planning.jobs import Cluster, Workload

    lines = [
        "| model | ranks | link | system | MB sent, planned | run | MB at the peak, planned | run | s, planned | run"
        " | holds |",
        "|---|---:|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    print(*lines, sep="\n", flush=True)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        for ranks in arguments.ranks:
            for model in arguments.models:
                files = ["--one", "compute", model, str(log)]
                in_ranks(ranks, files, [])
                seconds = float(log.read_text())
                for name in arguments.links:
                    on_link = name != "loopback"
                    if on_link:
                        require_namespaces()
                    speed = parse_speed("--links", f"{name[0]}Gbit/s") if on_link else 2e9
                    cluster = Cluster(ranks, 1 if on_link else ranks, Links(2e9, speed, 1e-4, 1e-4), backend="gloo")
                    for system in arguments.systems:
                        with link(ranks, name) if on_link else nullcontext([]) as hosts:
                            in_ranks(ranks, ["--one", "train", model, system, str(log)], hosts)
                        workload = Workload(f"benchmarks.plan_models:{model}", micro_batches=BACKWARDS, dtype="fp32")
                        compared = check(workload, cluster, read_run(log), seconds)
                        sent, memory, time_ = compared
                        low, high = time_.planned
                        lines.append(
                            f"| {model} | {ranks} | {name} | {system}"
                            f" | {sent.planned[0] / 1e6:.2f} | {sent.ran / 1e6:.2f}"
                            f" | {memory.planned[0] / 1e6:.0f} | {memory.ran / 1e6:.0f} | {low:.2f} to {high:.2f}"
                            f" | {time_.ran:.2f} | {', '.join('yes' if each.holds else 'no' for each in compared)} |"
                        )
                        print(lines[-1], flush=True)
                        results.append({"model": model, "ranks": ranks, "link": name, "system": system, "compared": [
                            vars(each) for each in compared]})  # fmt: skip
    if arguments.output:
        arguments.output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        arguments.output.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    main()
