"""How much communication an optimizer step exposes on CUDA: ZeroSync, stock DeepSpeed, its own coalescing, DDP, FSDP2.

    python benchmarks/exposed.py --model mlp                                  # one GPU, which is rank 0 of 64
    torchrun --nproc_per_node 8 benchmarks/exposed.py --model gpt             # eight GPUs and NCCL

On one GPU, collectives are delays in proportion to their bytes (``links.py``): what NCCL's kernels take from those of
the model is not in it. Measured are two models of nodes of eight GPUs, each with a NIC of 400 Gbit/s: a GPU's bytes all
go through its own NIC, at 50 GB/s, as in an all-to-all; or, as in NCCL's rings, which come to all GPUs of a node by
NVLink before they leave it by one of its NICs, a GPU has some six times that. Figures of the second have its rate in
their names. Each system has processes of its own, one system after the other. Each round times some steps in a row, so
that what a step leaves under way can overlap the next one. A step's medians are

- ``step``: seconds until the device has done what the step asks for, on the slowest rank;
- ``compute``: with links that take no time; with NCCL, with all collectives left out, which computes nonsense;
- ``host``: until the program goes on after one step then, which waits for nothing but the norm;
- ``kernels``: the sum of what kernels of one step take then, all streams together; much less says that the host is
  what is slow;
- ``communication``: the sum of the step's delays; with NCCL, its collectives again, one after the other.

``exposed`` is (step - compute) / max(compute, communication): 0 where all is hidden and compute is the longer.
Memory is the most of the timed steps, in MiB; ``retries`` are calls of the allocator that had to free cached memory.
--cpu tries the program without a GPU; its times mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # which leaves CUDA fit to be forked

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from links import Links, collectives, replay
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, VOCABULARY

from zerosync_strategy import attach, prepare_cpu

SYSTEMS = (
    "ddp", "fsdp2-3", "stock-2", "coalesced-2", "zerosync-2", "stock-3", "coalesced-3",
    "zerosync-3", "zerosync-3-held", "zerosync-3-resharding",
)  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {"held": {"param_memory_budget": "all"}}
# Reshard after each forward whatever is gathered, as FSDP2 does.
ZERO: dict[str, dict[str, Any]] = {
    "resharding": {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
}


class Timed:
    """A model, and its optimizer step of ``accumulate`` micro-batches."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(0)
        self.accumulate, self._is_gpt = options.accumulate, options.model == "gpt"
        width = options.width
        if self._is_gpt:
            self.net: nn.Module = GPT(options.layers, width, options.context, heads=max(1, width // 128))
            self.batch = torch.randint(VOCABULARY, (options.batch, options.context + 1), device=device)
        else:
            layers = (nn.Sequential(nn.Linear(width, width, bias=False), nn.GELU()) for _ in range(options.layers))
            self.net = nn.Sequential(*layers)
            self.batch = torch.randn(options.batch * options.context, width, device=device).bfloat16()
        self.net.to(device)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.net.blocks if self._is_gpt else self.net)  # type: ignore[arg-type]

    def loss(self, module: Any) -> torch.Tensor:
        """Of a micro-batch."""
        if not self._is_gpt:
            return module(self.batch).float().square().mean() / self.accumulate
        logits = module(self.batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), self.batch[:, 1:].flatten()) / self.accumulate

    def step(self) -> None:
        """Take an optimizer step."""
        raise NotImplementedError


class DDP(Timed):
    """DistributedDataParallel in bf16 without fp32 weights, which reduces in the last backward, by a hook of Python."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        super().__init__(options, device)
        self.ddp = DistributedDataParallel(self.net.bfloat16(), gradient_as_bucket_view=True)
        self.ddp.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))
        self.optimizer = torch.optim.AdamW(self.net.parameters())

    @staticmethod
    def _reduce(bucket: Any) -> Any:
        gradients = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(gradients, async_op=True).get_future().then(lambda _: gradients)

    def step(self) -> None:
        for k in range(self.accumulate):
            with self.ddp.no_sync() if k < self.accumulate - 1 else nullcontext():
                self.loss(self.ddp).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class FSDP2(Timed):
    """``fully_shard`` of each block and of the whole, which reduces in the last backward."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        super().__init__(options, device)
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        for module in (*self.blocks, self.net):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        self.optimizer = torch.optim.AdamW(self.net.parameters())

    def step(self) -> None:
        for k in range(self.accumulate):
            self.net.set_requires_gradient_sync(k == self.accumulate - 1)  # type: ignore[operator]
            self.loss(self.net).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class ZeRO(Timed):
    """A DeepSpeed engine of bf16 parameters with fp32 masters. ``kind``: who reduces its gradients."""

    def __init__(self, options: argparse.Namespace, device: torch.device, kind: str, stage: int, *ours: str) -> None:
        super().__init__(options, device)
        self.kind, variant = kind, "-".join(ours)
        self.engine, *_ = deepspeed.initialize(
            model=self.net,
            optimizer=torch.optim.AdamW(self.net.parameters()),
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": options.batch,
                "gradient_accumulation_steps": self.accumulate if kind == "stock" else 1,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": stage, "overlap_comm": True, **ZERO.get(variant, {})},
            },
        )
        self.zerosync = None
        if kind == "zerosync":
            self.zerosync = attach(self.engine, **OPTIONS.get(variant, {}))

    def step(self) -> None:
        with self.engine.coalesce_grad_reduction() if self.kind == "coalesced" else nullcontext():
            for _ in range(self.accumulate):
                loss = self.loss(self.engine)
                self.engine.backward(loss * self.accumulate if self.kind == "stock" else loss)
                if self.kind == "stock":
                    self.engine.step()
        if self.kind != "stock":
            self.engine.step()


def make(system: str, options: argparse.Namespace, device: torch.device) -> Timed:
    """Return a system by its name, as ``zerosync-3-held``: who reduces, the stage, what is special."""
    kind, *rest = system.split("-")
    if kind in ("ddp", "fsdp2"):
        return (DDP if kind == "ddp" else FSDP2)(options, device)
    return ZeRO(options, device, kind, int(rest[0]), *rest[1:])


def measure(system: str, options: argparse.Namespace, port: int) -> dict[str, Any]:
    """Medians in seconds, what is exposed, memory. In a process of its own."""
    is_fake = "RANK" not in os.environ
    if is_fake:
        os.environ |= {"RANK": "0", "WORLD_SIZE": str(options.world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}
    else:
        os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    device = torch.device("cpu")
    if options.cpu:
        prepare_cpu()
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if is_fake:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.world)
        dist.get_backend = lambda group=None: dist.Backend("nccl")
        dist.get_backend_config = lambda group=None: "cpu:nccl,cuda:nccl"
    deepspeed.init_distributed("gloo" if options.cpu else "nccl", dist_init_required=not is_fake, verbose=False)
    synchronize = deepspeed.get_accelerator().synchronize

    def seconds(run: Callable[[], Any]) -> float:
        spent = []
        for _ in range(options.warmup + options.rounds):
            dist.barrier()
            synchronize()
            began = time.perf_counter()
            for _ in range(options.steps):
                run()
            synchronize()
            each = torch.tensor((time.perf_counter() - began) / options.steps, device=device)
            dist.all_reduce(each, dist.ReduceOp.MAX)
            spent.append(float(each))
        return median(spent[options.warmup :])

    rates = options.gbits if is_fake else [0.0]  # real ones have one rate, and no model
    links, unlimited = Links(rates[0] * 1e9 / 8, options.latency / 1e6), Links(math.inf)
    found: dict[str, Any] = {"system": system}
    with ExitStack() as stack:
        if is_fake:
            if not options.cpu:
                links.calibrate()
            stack.enter_context(collectives(links))
        timed = make(system, options, device)
        for _ in range(options.warmup):
            timed.step()
        if not options.cpu:
            torch.cuda.reset_peak_memory_stats()
        found["step"] = seconds(timed.step)
        if not options.cpu:
            stats = torch.cuda.memory_stats()
            found["allocated"] = stats["allocated_bytes.all.peak"] / 2**20
            found["reserved"] = stats["reserved_bytes.all.peak"] / 2**20
            found["retries"] = stats["num_alloc_retries"]
        calls: list[tuple[Callable[..., Any], Any, Any]] = []

        def note(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            calls.append((function, args, kwargs))
            return function(*args, **kwargs)

        # In this order: what comes later spoils gradients, and parameters too.
        links.seconds = 0.0
        with collectives(note):
            timed.step()
        found["collectives"] = len(calls)
        found["communication"] = links.seconds if is_fake else seconds(partial(replay, calls))
        calls.clear()
        for rate in rates[1:]:
            links.set_rate(rate * 1e9 / 8)
            found[f"step at {rate:g}"] = seconds(timed.step)
            links.seconds = 0.0
            timed.step()
            found[f"communication at {rate:g}"] = links.seconds
    with collectives(unlimited if is_fake else Links(None)):
        found["compute"] = seconds(timed.step)
        returns = []
        for _ in range(options.rounds):
            synchronize()
            began = time.perf_counter()
            timed.step()
            returns.append(time.perf_counter() - began)
        found["host"] = median(returns)
        synchronize()
        if not options.cpu:
            with profile(activities=[ProfilerActivity.CUDA]) as kernels:
                timed.step()
                synchronize()
            found["kernels"] = sum(each.self_device_time_total for each in kernels.key_averages()) / 1e6
    for of_rate in ("", *(f" at {rate:g}" for rate in rates[1:])):
        longer = max(found["compute"], found[f"communication{of_rate}"])
        found[f"exposed{of_rate}"] = max(0.0, found[f"step{of_rate}"] - found["compute"]) / longer
    return found


def in_a_process(system: str, options: argparse.Namespace, port: int, results: Any) -> None:
    """Put what is measured into ``results``."""
    results.put(measure(system, options, port))


def main() -> None:
    """Measure each system, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("mlp", "gpt"), default="mlp")
    defaults = dict(layers=8, width=4096, context=1024, batch=8, accumulate=4, warmup=1, rounds=3, steps=3, world=64)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--gbits", type=float, nargs="+", default=[400.0, 2400.0], help="that a rank sends and receives"
    )
    parser.add_argument("--latency", type=float, default=50, help="microseconds of each collective besides (50)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--cpu", action="store_true", help="to try it: times of a CPU have no meaning here")
    parser.add_argument("--output", type=Path, help="instead of results/DATE-exposed-MODEL.json")
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.device_count():
        raise SystemExit("exposed.py measures streams of CUDA, and found no GPU. On CPU, use compare.py.")
    fork, results = multiprocessing.get_context("fork"), []
    port = int(os.environ.get("MASTER_PORT", "29500"))
    for number, system in enumerate(options.systems, 1):
        queue = fork.SimpleQueue()
        process = fork.Process(target=in_a_process, args=(system, options, port + number, queue))
        process.start()
        process.join()
        found = queue.get() if process.exitcode == 0 and not queue.empty() else {"system": system, "failed": True}
        results.append(found)
        if os.environ.get("RANK", "0") == "0":
            print(
                f"{found.pop('system'):23}" + "  ".join(f"{what} {value:.4g}" for what, value in found.items()),
                flush=True,
            )
            found["system"] = system
    if os.environ.get("RANK", "0") == "0":
        versions = {"torch": torch.__version__, "deepspeed": deepspeed.__version__}
        name = "CPU" if options.cpu else torch.cuda.get_device_name()
        given = {option: value for option, value in vars(options).items() if option != "output"}
        record = {"options": given, "device": name, "versions": versions, "systems": results}
        name = f"{datetime.date.today()}-exposed-{options.model}.json"
        path = options.output or Path(__file__).parent / "results" / name
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"written to {path}")
    sys.exit(any("failed" in found for found in results))


if __name__ == "__main__":
    main()
