"""Host work of a training step on W ranks, counted in one process: real DeepSpeed as rank 0 of W.

    python benchmarks/host_cost.py --worlds 8 64 1024

torch's fake process group takes every collective, and moves nothing. So what is counted is what rank 0 issues:
operators (ATen calls), collectives by kind with the bytes that one rank sends for them, and Python calls (cProfile).
Seconds are this process's; they include a CPU's own copies, which on a GPU run beside the host. Values mean nothing:
sums lack the other ranks' parts. On the CPU, ZeroSync's step goes in pieces that fit into a processor's cache, on no
other device: "uncut" is the step without them, by stripes alone. DeepSpeed's own reduction ("stock") beside ZeroSync's
on each stage; "3-held" has ``param_memory_budget="all"``, "streamed" has ``coalesce=False``, "node" keeps all in node
shards, of ``--node-size`` ranks each. Peaks of memory are those
of the process above what it had before the forward, as multiples of the bytes of all parameters, which are those of all
gradients.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

IN_NODE_SHARDS = {"device": 0, "node": "all"}
OPTIONS: dict[str, dict[str, Any]] = {
    "2-streamed": {"coalesce": False}, "3-streamed": {"coalesce": False}, "3-held": {"param_memory_budget": "all"},
    "2-node": {"grad_memory_budget": IN_NODE_SHARDS},
    "3-node": {"grad_memory_budget": IN_NODE_SHARDS, "param_memory_budget": IN_NODE_SHARDS},
}  # fmt: skip
SYSTEMS = (
    *("stock-1", "stock-2", "stock-3", "zerosync-1", "zerosync-2", "zerosync-2-streamed", "zerosync-2-node"),
    *("zerosync-3", "zerosync-3-streamed", "zerosync-3-held", "zerosync-3-node", "torch"),
)
HERE = Path(__file__).resolve().parent


def measure(
    system: str, world_size: int, layers: int, width: int, backwards: int, bucket: int | None, node_size: int = 8
) -> dict[str, Any]:
    """Build ``system``, train two steps to warm up, and count the next ones. In a process of its own."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from zerosync_strategy.core.attached.budgets import ProcessGauge

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    parameters = sum(param.numel() for param in model.parameters())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    attach_seconds = 0.0
    if system == "torch":
        forward, engine = model, None
    else:
        import deepspeed

        from zerosync_strategy import attach, prepare_cpu

        prepare_cpu()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        kind, _, variant = system.partition("-")
        zero: dict[str, Any] = {"stage": int(variant[0]), "stage3_param_persistence_threshold": 0}
        if bucket is not None:
            zero |= {"reduce_bucket_size": bucket}
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": backwards if kind == "stock" else 1,
                "zero_allow_untested_optimizer": True, "zero_optimization": zero,
            },
        )  # fmt: skip
        forward = engine
        if kind == "zerosync":
            began = time.perf_counter()
            attach(engine, node_size=min(node_size, world_size), **OPTIONS.get(variant, {}))
            attach_seconds = time.perf_counter() - began

    x = torch.ones(1, width)

    def run_backwards() -> None:
        for _ in range(backwards):
            loss = forward(x).square().mean() / backwards
            if engine is None:
                loss.backward()
                continue
            engine.backward(loss)
            if system.startswith("stock") and not engine.is_gradient_accumulation_boundary():
                engine.step()

    def step() -> None:
        if engine is None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.step()

    for _ in range(2):
        run_backwards()
        step()
    seconds = {}
    for name, part in (("forward and backward", run_backwards), ("step", step)):
        began = time.perf_counter()
        part()
        seconds[name] = time.perf_counter() - began
    gauge = ProcessGauge()
    before, peaks = gauge.used(), {}
    for name, part in (("forward and backward", run_backwards), ("step", step)):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        part()
        peaks[name] = (gauge.peak() - before) / (4 * parameters)
    calls = {}
    for name, part in (("forward and backward", run_backwards), ("step", step)):
        with _operators() as operators:
            part()
        calls[name] = operators.count
    run_backwards()
    with _steps_uncut(), _operators() as operators:
        step()
    calls["step uncut"] = operators.count
    with _collectives(engine) as collectives:
        run_backwards()
        step()
    profile = cProfile.Profile()
    profile.enable()
    run_backwards()
    step()
    profile.disable()
    return {
        "system": system, "world_size": world_size, "node_size": node_size, "parameters": parameters,
        "tensors": 2 * layers,
        "backwards": backwards, "aten_calls": calls, "python_calls": pstats.Stats(profile).total_calls,  # type: ignore[attr-defined]
        "collectives": {kind: [traffic.calls, traffic.bytes] for kind, traffic in collectives.items()},
        "peaks": peaks, "seconds": {"attach": attach_seconds, **seconds},
    }  # fmt: skip


def _operators() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operators(TorchDispatchMode):
        sees_zerosync = True  # its own, too
        count = 0

        def __init__(self) -> None:
            super().__init__()
            self.collectives: Counter[str] = Counter()

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            if function.namespace == "c10d":
                self.collectives[function.__name__] += 1
            return function(*args, **(kwargs or {}))

    return Operators()


def _living() -> Any:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Living(TorchDispatchMode):
        """The bytes of what operators have had and that is alive: ``now``, after the last one, and the ``most``."""

        sees_zerosync = True
        now = most = 0

        def __init__(self) -> None:
            super().__init__()
            self._seen: dict[int, int] = {}  # weak references to storages, by their addresses

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            for leaf in tree_leaves((args, kwargs, result)):
                if type(leaf) in (torch.Tensor, torch.nn.Parameter):
                    storage = leaf.untyped_storage()
                    if storage._cdata not in self._seen:
                        self._seen[storage._cdata] = storage._weak_ref()
            self.now = sum(map(self._nbytes, list(self._seen)))
            self.most = max(self.most, self.now)
            return result

        def _nbytes(self, address: int) -> int:
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(self._seen[address])
            if storage is not None:
                return storage.nbytes()
            torch.UntypedStorage._free_weak_ref(self._seen.pop(address))
            return 0

    return Living()


@contextmanager
def _steps_uncut() -> Iterator[None]:
    """While active, ranges of master weights are stepped at once, as on a device other than the CPU."""
    from zerosync_strategy.core.optimizer import masters

    def uncut(master: Any, begin: int, end: int, stepped: Any = None) -> Iterator[Any]:
        yield begin, end, stepped

    cut = masters.step_slices
    masters.step_slices = uncut
    try:
        yield
    finally:
        masters.step_slices = cut


def _collectives(engine: Any) -> Any:
    from zerosync_strategy.tools.plan.measures import ProcessCounter

    @contextmanager
    def counting() -> Any:
        found: dict[str, Any] = {}
        if engine is None:
            yield found
            return
        with ProcessCounter() as counter:
            yield found
            found |= counter.take()

    return counting()


def main() -> None:
    """Measure each system on each number of ranks, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--layers", type=int, default=8, help="Linear layers")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--backwards", type=int, default=1)
    parser.add_argument("--bucket", type=int, help="DeepSpeed's reduce_bucket_size; its default if left out")
    parser.add_argument("--node-size", type=int, nargs="+", default=[8], help="ranks on a node; several for several")
    parser.add_argument("--output", type=Path, help="write FILE.json, FILE.md and, with matplotlib, FILE.png")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        system, world_size = arguments.one.split("@")
        given = (getattr(arguments, name) for name in ("layers", "width", "backwards", "bucket"))
        measured = measure(system, int(world_size), *given, node_size=arguments.node_size[0])
        print("RESULT " + json.dumps(measured))
        return
    runs = []
    for world_size, system in product(arguments.worlds, arguments.systems):
        if system == "torch" and world_size != arguments.worlds[0]:
            continue
        for node_size in arguments.node_size if system.endswith("-node") else arguments.node_size[:1]:
            runs.append(_in_a_process(system, world_size, node_size, arguments))
            print(_row(runs[-1]), flush=True)
    if arguments.output:
        _write(runs, arguments.output)


def _in_a_process(system: str, world_size: int, node_size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", f"{system}@{world_size}", "--node-size", str(node_size)]
    for name in ("layers", "width", "backwards", "bucket"):
        if (value := getattr(arguments, name)) is not None:
            command += [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise RuntimeError(f"{system} on {world_size} ranks failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


_HEAD = (
    "| system | W | G | ATen calls, forward and backward | ATen calls, step | ATen calls, step uncut | collectives"
    " | MB sent | Python calls | peak in the backward | peak in the step | attach, s | forward and backward, ms"
    " | step, ms |"
)


def _row(run: dict[str, Any]) -> str:
    calls, seconds = run["aten_calls"], run["seconds"]
    kinds = ", ".join(f"{kind} {count}" for kind, (count, _) in sorted(run["collectives"].items()))
    sent = sum(nbytes for _, nbytes in run["collectives"].values())
    ranks = run["world_size"] if run["system"] != "torch" else "-"
    of_node = run["node_size"] if run["system"].endswith("-node") else "-"
    cells = [
        run["system"], ranks, of_node, f"{calls['forward and backward']:,}", f"{calls['step']:,}",
        f"{calls['step uncut']:,}", kinds or "-",
        f"{sent / 1e6:.1f}", f"{run['python_calls']:,}",
        *(f"{peak:.2f}" for peak in run["peaks"].values()), f"{seconds['attach']:.2f}",
        f"{1000 * seconds['forward and backward']:.0f}", f"{1000 * seconds['step']:.0f}",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _write(runs: list[dict[str, Any]], path: Path) -> None:
    import deepspeed
    import torch
    from output import command

    first = runs[0]
    versions = {"torch": torch.__version__, "deepspeed": deepspeed.__version__, "python": platform.python_version()}
    results = {"date": str(date.today()), "command": command(), "versions": versions, "runs": runs}
    path.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    lines = [
        f"# {results['date']}: host work of one step as rank 0 of W",
        "",
        f"{first['tensors'] // 2} Linear layers, {first['parameters'] / 1e6:.1f} M parameters, fp32,"
        f" {first['backwards']} backward(s) per step, torch's fake process group."
        f" {', '.join(f'{name} {version}' for name, version in versions.items())}.",
        "",
        f"    {results['command']}",
        "",
        "On the CPU, ZeroSync steps by pieces that fit into a processor's cache. Uncut is the step of other devices, on"
        " which it goes by stripes alone (H3).",
        "",
        _HEAD,
        "|---|---:|---:|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|",
        *map(_row, runs),
    ]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for system in dict.fromkeys(run["system"] for run in runs if run["system"] != "torch"):
        of_system = [run for run in runs if run["system"] == system]
        axes.plot(
            [run["world_size"] for run in of_system], [_calls(run) for run in of_system],
            marker="o", label=system, linestyle="--" if system.startswith("stock") else "-",
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="ATen calls, forward to step")
    axes.legend(loc="upper left", fontsize="small")
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=120)


def _calls(run: dict[str, Any]) -> int:
    return run["aten_calls"]["forward and backward"] + run["aten_calls"]["step uncut"]


if __name__ == "__main__":
    main()
