"""What a checkpoint costs: seconds that training is blocked, seconds until it is complete, bytes, host memory.

Two ranks, bf16 and AdamW, DeepSpeed's own save beside ZeroSync's distributed one, at once and in the background, and
FSDP2's ``dcp.save`` and ``dcp.async_save``; then loading, by as many ranks and by others.

    python benchmarks/checkpoints.py --output benchmarks/results/<date>-checkpoints
    python benchmarks/checkpoints.py --steps  # how long steps take while a thread writes
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

LAYERS = {"35m": (20, 1024), "100m": (80, 1024), "small": (300, 64)}
"""Number and width."""
WORDS = 16_000
ROUNDS, STEPS = 8, 8
OURS: dict[str, Any] = {"checkpoint_format": "distributed"}


def model(size: str) -> nn.Module:
    """An embedding and square layers."""
    torch.manual_seed(0)
    count, width = LAYERS[size]
    return nn.Sequential(nn.Embedding(WORDS, width), *(nn.Linear(width, width) for _ in range(count)))


def loss_of(module: Any) -> torch.Tensor:
    """Of other words on each rank."""
    return module(torch.arange(8) + dist.get_rank()).float().square().mean()


@dataclass
class Watch:
    """Seconds, the growth of resident memory, and the longest time for which this thread did not run."""

    seconds: float = 0.0
    megabytes: float = 0.0
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Watch]:
        """Measure what is done meanwhile."""
        first = most = resident()

        def look() -> None:
            nonlocal most
            while not self._stop.wait(0.005):
                most = max(most, resident())

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        begin = time.monotonic()
        try:
            yield self
        finally:
            self.seconds = time.monotonic() - begin
            self._stop.set()
            thread.join()
            self.megabytes = most - first


def resident() -> float:
    """Return the resident memory of this process, in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def size_of(folder: Path) -> float:
    """Return the bytes of all files, in MB."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


def timed(what: str, call: Callable[[], Any], folder: Path | None = None) -> None:
    """A row: from a barrier until all ranks have returned and what is written is on the disk."""
    dist.barrier()
    with Watch()() as watch:
        call()
        os.sync()
        dist.barrier()
    row(what, watch.seconds, watch.seconds, folder, watch.megabytes)


def in_background(what: str, begin: Callable[[], Any], end: Callable[[], Any], folder: Path) -> None:
    """A row: how long the first call takes, and how long until the second has returned."""
    dist.barrier()
    with Watch()() as watch:
        start = time.monotonic()
        begin()
        blocked = time.monotonic() - start
        end()
        os.sync()
        dist.barrier()
    row(what, blocked, watch.seconds, folder, watch.megabytes)


def row(what: str, blocked: float, complete: float, folder: Path | None, megabytes: float) -> None:
    """Print a row, with the most of all ranks."""
    most = torch.tensor([blocked, complete, megabytes])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        size = "" if folder is None else f"{size_of(folder):,.0f}"
        print(f"| {what} | {most[0]:.2f} | {most[1]:.2f} | {size} | {most[2]:,.0f} |", flush=True)


def engine_of(size: str, stage: int, **options: Any) -> Any:
    """Return an engine after one step; without options, a plain one."""
    import deepspeed

    from zerosync_strategy import attach, prepare_cpu

    prepare_cpu()
    if not dist.is_initialized():
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    net = model(size)
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9, "zero_optimization": {"stage": stage, "sub_group_size": 20_000_000},
    }  # fmt: skip
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config, dist_init_required=False)
    if options:
        attach(engine, **options)
    step(engine)
    return engine


def step(engine: Any) -> None:
    """Make an optimizer step."""
    engine.backward(loss_of(engine))
    engine.step()


def save(size: str, stage: int, folder: Path) -> None:
    """Print the rows of DeepSpeed's and our saves."""
    name = f"ZeRO-{stage}"
    engine = engine_of(size, stage)
    timed(f"{name}, DeepSpeed's own", lambda: engine.save_checkpoint(folder / "stock", tag="t"), folder / "stock")
    engine.destroy()
    engine = engine_of(size, stage, **OURS)
    timed(f"{name}, distributed", lambda: engine.save_checkpoint(folder / "ours", tag="t"), folder / "ours")
    engine.destroy()
    engine = engine_of(size, stage, **OURS, checkpoint_background=True)
    for number in ("first", "later"):

        def begin(tag: str = number) -> None:
            engine.save_checkpoint(folder / "background", tag=tag)

        in_background(
            f"{name}, distributed, in the background, {number} save", begin, engine.zerosync.wait_for_save,
            folder / "background" / number,
        )  # fmt: skip
    engine.destroy()


def load(size: str, stage: int, folder: Path) -> None:
    """Print the rows of loads."""
    name, ranks = f"ZeRO-{stage}", int(os.environ["WORLD_SIZE"])
    file = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    if ranks == 2 and (folder / "stock" / "t" / file).exists():  # else of another stage
        engine = engine_of(size, stage)
        timed(f"{name}, {ranks} ranks, DeepSpeed's own", lambda: engine.load_checkpoint(folder / "stock", tag="t"))
        engine.destroy()
    engine = engine_of(size, stage, **OURS)
    timed(f"{name}, {ranks} rank(s), distributed", lambda: engine.load_checkpoint(folder / "ours", tag="t"))
    engine.destroy()


def save_fsdp(size: str, _: int, folder: Path) -> None:
    """Print the rows of FSDP2's saves."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("cpu:gloo")
    mesh, policy = init_device_mesh("cpu", (dist.get_world_size(),)), MixedPrecisionPolicy(torch.bfloat16)
    net: Any = model(size)
    for layer in net:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loss_of(net).backward()
    optimizer.step()

    def state() -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(net, optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    timed("FSDP2, dcp.save", lambda: dcp.save(state(), checkpoint_id=folder / "fsdp"), folder / "fsdp")
    saving: list[Any] = []
    for number in ("first", "later"):
        place = folder / f"fsdp-{number}"

        def begin(place: Path = place) -> None:
            saving[:] = [dcp.async_save(state(), checkpoint_id=place)]

        in_background(f"FSDP2, dcp.async_save, {number} save", begin, lambda: saving[0].result(), place)


def steps(size: str, stage: int, folder: Path) -> None:
    """Print a row: the median of steps alone, while a thread writes, and while another process writes the same."""
    from zerosync_strategy.core.attached.contents import Contents
    from zerosync_strategy.core.checkpoints import dcp

    engine = engine_of(size, stage, **OURS, checkpoint_background=True)
    kinds: dict[str, list[float]] = {"alone": [], "thread": [], "process": []}

    def timed_step(kind: str) -> None:
        dist.barrier()
        begin = time.perf_counter()
        step(engine)
        kinds[kind].append(time.perf_counter() - begin)

    def is_writing() -> bool:
        all_do = torch.tensor(int((folder / ".t.writing").exists()))
        dist.all_reduce(all_do, dist.ReduceOp.MIN)
        return bool(all_do)

    for _ in range(ROUNDS):
        for _ in range(STEPS):
            timed_step("alone")
        engine.save_checkpoint(folder, tag="t")
        while is_writing():
            timed_step("thread")
        kinds["thread"].pop()  # the save ended in it
        engine.zerosync.wait_for_save()
        content = Contents(engine.zerosync._attached).written({}, exclude_frozen=False)
        if not (child := os.fork()):
            while True:
                dcp.write(folder, dist.get_rank(), content)
        for _ in range(STEPS):
            timed_step("process")
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    medians = torch.tensor([1e3 * statistics.median(each) for each in kinds.values()])
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        written = " | ".join(f"{each:.1f}" for each in medians)
        print(f"| {size}, ZeRO-{stage}, {dist.get_world_size()} rank(s) | {written} | {len(kinds['thread'])} |")
    engine.destroy()


RUNS: dict[str, Callable[[str, int, Path], None]] = {"save": save, "load": load, "fsdp": save_fsdp, "steps": steps}


def run(what: str, size: str, stage: int, folder: Path, ranks: int) -> str:
    """The rows that the ranks of one run print."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--rank", what, "--sizes", size, "--stages", str(stage)]
    command += ["--folder", str(folder)]
    started = [
        subprocess.Popen(
            command, env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    rows = ""
    for each in started:
        out, error = each.communicate(timeout=900)
        if each.returncode:
            raise SystemExit(f"{what} of {size} on ZeRO-{stage}, {ranks} ranks:\n{error[-3000:]}")
        rows += "".join(line + "\n" for line in (out or "").splitlines() if line.startswith("| "))
    return rows


HEAD = "| {} | blocked, s | complete, s | MB on disk | host memory, MB |\n|---|---|---|---|---|\n"


def main() -> None:
    """Run all, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(LAYERS))
    parser.add_argument("--steps", action="store_true", help="only steps with and without writes; of fewer sizes")
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--output", help="write OUTPUT.md, too")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        RUNS[options.rank](options.sizes[0], options.stages[0], options.folder)
        dist.barrier()
        dist.destroy_process_group()
        return
    if options.steps:
        print("| median step, ms | alone | a thread writes | a process writes the same | steps beside the thread |")
        print("|---|---|---|---|---|")
        for size, stage, ranks in itertools.product(options.sizes or ["small", "35m"], options.stages, (1, 2)):
            with tempfile.TemporaryDirectory() as name:
                print(run("steps", size, stage, Path(name), ranks), end="", flush=True)
        return
    text = ""
    for size in options.sizes or ["35m", "100m"]:
        numel = sum(param.numel() for param in model(size).parameters()) / 1e6
        text += f"\n## {numel:.0f} M parameters, two ranks\n\n" + HEAD.format("save")
        loads = ""
        for stage in options.stages:
            with tempfile.TemporaryDirectory() as name:
                text += run("save", size, stage, Path(name), 2)
                loads += "\n" + HEAD.format(f"load what ZeRO-{stage} on two ranks has saved")
                for reader, ranks in ((stage, 2), (5 - stage, 2), (stage, 1), (stage, 3)):
                    loads += run("load", size, reader, Path(name), ranks)
        with tempfile.TemporaryDirectory() as name:
            text += run("fsdp", size, 0, Path(name), 2)
        text += loads
    print(text)
    if options.output:
        path = Path(options.output).with_suffix(".md")
        path.write_text(f"# Checkpoints\n\n`python benchmarks/checkpoints.py`, {time.strftime('%Y-%m-%d')}\n{text}")


if __name__ == "__main__":
    main()
