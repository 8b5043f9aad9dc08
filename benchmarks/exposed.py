"""How much communication an optimizer step exposes on CUDA: ZeroSync and stock DeepSpeed side by side, and DDP's time.

    torchrun --nproc_per_node 8 benchmarks/exposed.py --stage 2 --layers 24 --width 2048

Each system's step is timed three ways: as it is (T); with all collectives left out, which computes nonsense in the same
time (compute, C); and its collectives alone, as the step issued them (communication, M). Exposed is what the step takes
beyond its compute, as a fraction of the longer of the two: (T - C) / max(C, M). Perfect overlap has 0 where compute is
the longer; no overlap at all has M / max(C, M). In fp32 (--no-bf16), DeepSpeed skips the optimizer where gradients are
nonsense, so that the compute comes out short. DDP reduces in C++, where no collective can be left out, so of DDP there
is the step alone, of parameters in the same precision and without fp32 weights. --cpu tries the program, on gloo.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, VOCABULARY

from zerosync_strategy import attach, prepare_cpu

COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_single",
    "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all_single", "isend", "irecv",
)  # fmt: skip


class _Done:
    """What a collective that was left out returns."""

    def wait(self, *_: Any) -> None: ...

    def is_completed(self) -> bool:
        return True


@contextmanager
def collectives(instead: Callable[..., Any]) -> Iterator[None]:
    """Call ``instead(function, args, kwargs)`` for every collective, nested ones once."""
    nested = False
    places = [(module, name) for module in (dist, dist.distributed_c10d) for name in COLLECTIVES]
    places += [(deepspeed.comm.comm.cdb, name) for name in ("all_gather_function", "reduce_scatter_function")]
    stock = [(owner, name, getattr(owner, name)) for owner, name in places if hasattr(owner, name)]

    def replacement(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal nested
            if nested:
                return function(*args, **kwargs)
            nested = True
            try:
                return instead(function, args, kwargs)
            finally:
                nested = False

        return call

    for owner, name, function in stock:
        setattr(owner, name, replacement(function))
    try:
        yield
    finally:
        for owner, name, function in stock:
            setattr(owner, name, function)


class Timed:
    """A model, its optimizer step of ``accumulate`` micro-batches, and how long that takes."""

    def __init__(self, options: argparse.Namespace, device: Any) -> None:
        torch.manual_seed(0)
        self.net = GPT(options.layers, options.width, options.context, heads=8).to(device)
        self.accumulate, self.device = options.accumulate, device
        self.tokens = torch.randint(VOCABULARY, (options.batch, options.context + 1), device=device)

    def loss(self, module: Any) -> torch.Tensor:
        """Of a micro-batch."""
        logits = module(self.tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), self.tokens[:, 1:].flatten())

    def step(self) -> None:
        """Take an optimizer step."""
        raise NotImplementedError

    def seconds(self, run: Callable[[], Any]) -> float:
        """Until the device has done what ``run`` asks for, on the slowest rank."""
        synchronize = deepspeed.get_accelerator().synchronize
        dist.barrier()
        synchronize()
        began = time.perf_counter()
        run()
        synchronize()
        spent = torch.tensor(time.perf_counter() - began, device=self.device)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        return float(spent)


class Parallel(Timed):
    """DistributedDataParallel, without a reduction in all but the last backward."""

    def __init__(self, options: argparse.Namespace, device: Any) -> None:
        super().__init__(options, device)
        self.ddp = DistributedDataParallel(self.net.bfloat16() if options.bf16 else self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters())

    def step(self) -> None:
        for k in range(self.accumulate):
            with self.ddp.no_sync() if k < self.accumulate - 1 else nullcontext():
                (self.loss(self.ddp) / self.accumulate).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class System(Timed):
    """One engine and its optimizer step."""

    def __init__(self, options: argparse.Namespace, with_zerosync: bool, device: Any) -> None:
        super().__init__(options, device)
        net = self.net
        self.engine, *_ = deepspeed.initialize(
            model=net,
            optimizer=torch.optim.AdamW(net.parameters()),
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": options.batch,
                "gradient_accumulation_steps": 1 if with_zerosync else options.accumulate,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "bf16": {"enabled": options.bf16},
                "zero_optimization": {"stage": options.stage, "overlap_comm": True},
            },
        )
        self.zerosync = attach(self.engine) if with_zerosync else None

    def step(self) -> None:
        for k in range(self.accumulate):
            if self.zerosync is not None and k == self.accumulate - 1:
                self.zerosync.window.expect_last()
            loss = self.loss(self.engine)
            self.engine.backward(loss / (1 if self.zerosync is None else self.accumulate))
            if self.zerosync is None:
                self.engine.step()
        if self.zerosync is not None:
            self.engine.step()

    def without_collectives(self) -> None:
        with collectives(lambda function, args, kwargs: _Done()):
            self.step()

    def calls(self) -> list[tuple[Callable[..., Any], Any, Any]]:
        """The collectives of one step."""
        calls: list[tuple[Callable[..., Any], Any, Any]] = []

        def note(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            calls.append((function, args, kwargs))
            return function(*args, **kwargs)

        with collectives(note):
            self.step()
        return calls


def replay(calls: list[tuple[Callable[..., Any], Any, Any]]) -> None:
    """Issue ``calls`` again, one after the other, and wait for them."""
    works = [function(*args, **kwargs) for function, args, kwargs in calls]
    for work in works:
        if work is not None:
            work.wait()


def measure(timed: dict[str, Timed], warmup: int, rounds: int) -> dict[str, dict[str, float]]:
    """Medians in seconds, and what is exposed; the systems take turns."""
    results: dict[str, dict[str, float]] = {name: {} for name in timed}
    systems = {name: system for name, system in timed.items() if isinstance(system, System)}

    def take_turns(what: str, runs: dict[str, Callable[[], Any]]) -> None:
        spent: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(warmup + rounds):
            for name, run in runs.items():
                spent[name].append(timed[name].seconds(run))
        for name, of in spent.items():
            results[name][what] = median(of[warmup:])

    # In this order: the second spoils gradients, and the third parameters too.
    take_turns("step", {name: system.step for name, system in timed.items()})
    calls = {name: system.calls() for name, system in systems.items()}
    take_turns("communication", {name: partial(replay, calls[name]) for name in systems})
    take_turns("compute", {name: system.without_collectives for name, system in systems.items()})
    for of in (results[name] for name in systems):
        of["exposed"] = max(0.0, of["step"] - of["compute"]) / max(of["compute"], of["communication"])
    return results


def main() -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    for name, default in dict(layers=12, width=1024, context=512, batch=4, accumulate=4, warmup=3, rounds=10).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--cpu", action="store_true", help="to try it: times of a CPU have no meaning here")
    parser.add_argument("--output", type=Path, help="instead of results/DATE-exposed-STAGE.json")
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        raise SystemExit("exposed.py measures streams of CUDA, and found no GPU. On CPU, use compare.py.")
    if "RANK" not in os.environ:
        raise SystemExit("exposed.py is started by torchrun: torchrun --nproc_per_node 8 benchmarks/exposed.py")
    device = torch.device("cpu")
    if options.cpu:
        prepare_cpu()
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    deepspeed.init_distributed("gloo" if options.cpu else "nccl", verbose=False)
    engines = {"zerosync": System(options, True, device), "stock": System(options, False, device)}
    results = measure(
        {**engines, "ddp": Parallel(options, device)},
        options.warmup,
        options.rounds,
    )
    if dist.get_rank() == 0:
        versions = {"torch": torch.__version__, "deepspeed": deepspeed.__version__}
        if not options.cpu:
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        name = "CPU" if options.cpu else torch.cuda.get_device_name()
        given = {option: value for option, value in vars(options).items() if option != "output"}
        record = {"options": given, "ranks": dist.get_world_size(), "device": name, "versions": versions,
                  "seconds": results}  # fmt: skip
        name = f"{datetime.date.today()}-exposed-{options.stage}.json"
        path = options.output or Path(__file__).parent / "results" / name
        path.write_text(json.dumps(record, indent=1) + "\n")
        for system, of in results.items():
            print(f"{system:9}" + "".join(f"{what} {value:8.4f}  " for what, value in of.items()))
        print(f"written to {path}")


if __name__ == "__main__":
    main()
