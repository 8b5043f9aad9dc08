"""Plans against runs: bytes, memory and time of real steps, on CPU ranks with gloo.

    python benchmarks/plan_check.py --output benchmarks/results/plan-check

Each run is W processes that train a model of ``plan_models.py`` for a few steps and log them; the link between them is
measured by ``doctor --link``, as many ranks at once. The same is planned, with a rank's own work measured by W
processes at once, because they share this machine's cores. Results are added to those that the output's file has.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from importlib.metadata import version
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
STEPS, BACKWARDS = 6, 2
COLUMNS = (
    "model", "ranks", "link", "system", "MB sent, planned", "run", "MB at the peak, planned", "run", "s, planned",
    "run", "upper / lower", "bytes, memory, time hold",
)  # fmt: skip


def train(model: str, system: str, log: Path) -> None:
    """Train as one rank, and log the steps; as rank 0."""
    import deepspeed
    import torch

    from benchmarks import plan_models
    from zerosync_strategy import attach
    from zerosync_strategy.core.runlog import RunLog
    from zerosync_strategy.tools.plan.models import loss_of

    torch.manual_seed(0)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    run = RunLog(log if os.environ["RANK"] == "0" else os.devnull)
    stage, options = SYSTEMS[system]
    module, batch = getattr(plan_models, model)()
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


def as_rank(model: str, systems: list[str], folder: Path) -> None:
    """Measure the link, then train by each of ``systems``, as one rank, each in a fork."""
    import deepspeed  # noqa: F401
    import torch

    from zerosync_strategy import prepare_cpu
    from zerosync_strategy.core.runlog import import_all
    from zerosync_strategy.tools.doctor import link
    from zerosync_strategy.tools.links import Links

    torch.set_num_threads(1)
    prepare_cpu()
    import_all()
    on_hosts = "GLOO_SOCKET_IFNAME" in os.environ
    shared = os.environ["LOCAL_WORLD_SIZE"]
    calls: list[Any] = [lambda: link.check(Links(), saved_to=folder / "links")]
    calls += [lambda system=system: train(model, system, folder / system) for system in systems]
    for number, call in enumerate(calls):
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        os.environ["LOCAL_WORLD_SIZE"] = "1" if on_hosts and number == 0 else shared
        if pid := os.fork():
            if status := os.waitpid(pid, 0)[1]:
                raise SystemExit(os.waitstatus_to_exitcode(status))
        else:
            call()
            return


def in_ranks(count: int, arguments: list[str], hosts: list[Any]) -> None:
    """Run this file as ``count`` ranks, and wait for them."""
    from benchmarks.hosts import LOCAL, free_port

    port, ranks = free_port(), []
    for rank in range(count):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        variables |= {"MASTER_ADDR": (hosts or [LOCAL])[0].address, "MASTER_PORT": port}
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


def compared(model: str, ranks: int, names: list[str], systems: list[str]) -> list[dict[str, Any]]:
    """Return what the plans and runs of a model on so many ranks are, by link and system."""
    from benchmarks.hosts import link, require_namespaces
    from zerosync_strategy.tools.links import Links, read
    from zerosync_strategy.tools.plan.check import compare, read_run
    from zerosync_strategy.tools.plan.jobs import ZEROSYNC, Cluster, OptionSet, Workload
    from zerosync_strategy.tools.plan.plan import MEASURE, plan
    from zerosync_strategy.tools.plan.timing import bounds, crossing

    workload = Workload(f"benchmarks.plan_models:{model}", micro_batches=BACKWARDS, dtype="fp32")
    sets = [OptionSet(ZEROSYNC, *SYSTEMS[system]) for system in systems]
    found = []
    for name in names:
        on_hosts = name != "loopback"
        if on_hosts:
            require_namespaces()
        cluster = Cluster(ranks, 1 if on_hosts else ranks, backend="gloo")
        made = plan(workload, cluster, sets, MEASURE, at_once=ranks)
        with tempfile.TemporaryDirectory() as folder:
            with link(ranks, name) if on_hosts else nullcontext([]) as hosts:
                in_ranks(ranks, ["--one", model, folder, *systems], hosts)
            slow, fast = read(Path(folder) / "links", Links())
            there = dataclasses.replace(cluster, links=fast, slow_links=slow)
            for system, outcome in zip(systems, made.outcomes, strict=True):
                sent = crossing(outcome.collectives, there)
                outcome = dataclasses.replace(outcome, sent=sent, time=bounds(sent, outcome.work))
                each = compare(outcome, read_run(Path(folder) / system))
                found.append({
                    "model": model, "ranks": ranks, "link": name, "system": system, "measured": made.measured,
                    "work": vars(outcome.work), "link_seconds": vars(sent.seconds), "compared": [*map(vars, each)],
                })  # fmt: skip
                print(row(found[-1]), flush=True)
    return found


def row(result: dict[str, Any]) -> str:
    """Return a line of the table."""
    sent, memory, time = result["compared"]
    low, high = time["planned"]
    cells = (
        *(result[name] for name in ("model", "ranks", "link", "system")),
        *(f"{value / 1e6:.2f}" for value in (sent["planned"][0], sent["ran"])),
        *(f"{value / 1e6:.0f}" for value in (memory["planned"][0], memory["ran"])),
        f"{low:.2f} to {high:.2f}", f"{time['ran']:.2f}", f"{high / low:.2f}",
        ", ".join("yes" if each["holds"] else "no" for each in result["compared"]),
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def write(file: Path, results: list[dict[str, Any]]) -> None:
    """Add to what ``file`` has, as JSON and as a table; newer results replace older ones of the same run."""
    as_json = file.with_suffix(".json")
    known = json.loads(as_json.read_text())["results"] if as_json.exists() else []
    names = ("model", "ranks", "link", "system")
    merged = {tuple(each[name] for name in names): each for each in [*known, *results]}
    ordered = [merged[key] for key in sorted(merged, key=lambda key: (MODELS.index(key[0]), *key[1:]))]
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    machine = f"{len(cpu)} cores, {cpu[0].partition(': ')[2] if cpu else platform.machine()}"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed", "zerosync-strategy"))
    as_json.write_text(json.dumps({"machine": machine, "versions": versions, "results": ordered}, indent=1) + "\n")
    times = [each["compared"][2] for each in ordered]
    held = [sum(each["compared"][i]["holds"] for each in ordered) for i in range(3)]
    ratios = sorted(each["planned"][1] / each["planned"][0] for each in times)
    lines = [
        f"`python benchmarks/plan_check.py`, {machine}, Python {platform.python_version()}, {versions}.",
        f"Each row: the medians of {STEPS - 3} steps of {BACKWARDS} backwards, fp32, one thread per rank;"
        " the ranks share the cores. Links: loopback, or one network namespace per rank on a switch, at this rate.",
        "",
        f"Of {len(ordered)} rows, bytes hold in {held[0]} (1 %), peak memory in {held[1]} (10 %), the time in {held[2]}"
        f" (bounds). Upper over lower bound: {ratios[0]:.2f} to {ratios[-1]:.2f}, median"
        f" {ratios[len(ratios) // 2]:.2f}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|---|---:|---|---|{'---:|' * (len(COLUMNS) - 5)}---|",
        *map(row, ordered),
    ]  # fmt: skip
    file.with_suffix(".md").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Run and plan each combination, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--links", nargs="+", default=["loopback", "1gbit"], help="loopback, or a rate of tc; as root")
    parser.add_argument("--output", type=Path, help="write FILE.json and FILE.md, or add to them")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        model, folder, *systems = arguments.one
        as_rank(model, systems, Path(folder))
        return
    print(f"| {' | '.join(COLUMNS)} |", flush=True)
    for ranks in arguments.ranks:
        for model in arguments.models:
            results = compared(model, ranks, arguments.links, arguments.systems)
            if arguments.output:
                write(arguments.output, results)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    main()
