"""What the gather of changes saves: bytes by learning rate, the same bits, and time on a link. Needs root. On Linux.

    python benchmarks/changes.py --ranks 2 --steps 300 --rates 3e-4,1e-5,1e-6
    python benchmarks/changes.py --where link --model 35m --steps 24 --rates 3e-4 --systems ddp,full,changes,auto
    python benchmarks/changes.py --stage 3 --where link --model 10m --steps 40 --systems ddp,full,changes

All systems train the same small GPT on the same text, the source of Python's standard library, in bf16 with fp32
master weights: ZeRO-2, or ZeRO-3 that holds all parameters, with gathers in full (``full``), with
``gather_changes=True`` (``changes``) and ``"auto"``, and DDP (``ddp``). On stage 3 a step begins with the gather
after the step before. They live side by side in the same processes, one per rank, and take turns step by step. Bytes
are those of the network interface's own counter, by host; ``full``, ``changes`` and ``auto`` must end with the same
bits.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import logging
import multiprocessing
import os
import signal
import statistics
import sys
import time
import traceback
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))
os.environ.update({"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCH_CPP_LOG_LEVEL": "ERROR"})

import deepspeed  # noqa: E402
import gpt  # noqa: E402
import text  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from hosts import Host, link, loopback, require_namespaces, variables_of_rank  # noqa: E402
from output import command, processor  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from zerosync_strategy import WeightSnapshot, attach, prepare_cpu  # noqa: E402

CONTEXT = 128
MODELS = {"2m": {"layers": 4, "width": 192}, "10m": {"layers": 6, "width": 384}, "35m": {"layers": 11, "width": 512}}
SYSTEMS = ("ddp", "full", "changes", "auto")
OPTIONS: dict[str, bool | str] = {"full": False, "changes": True, "auto": "auto"}
QUIET = 0.02  # seconds after which all that was sent has been counted
PORTS = 29600


class DDP:
    """DDP on bf16 parameters, with fp32 master weights that every rank steps whole."""

    def __init__(self, model: torch.nn.Module, rate: float) -> None:
        self.module = model.bfloat16()
        self.model = DistributedDataParallel(self.module, gradient_as_bucket_view=True)
        self.masters = [param.detach().float() for param in self.module.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=rate)

    def step(self, batch: torch.Tensor) -> float:
        """One optimizer step."""
        loss = gpt.next_byte_loss(self.model(batch), batch)
        loss.backward()
        for master, param in zip(self.masters, self.module.parameters(), strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for master, param in zip(self.masters, self.module.parameters(), strict=True):
                param.copy_(master)
                param.grad = None
        return loss.item()


class ZeRO:
    """ZeroSync on ZeRO-2, or on ZeRO-3 with all parameters held."""

    def __init__(self, model: torch.nn.Module, rate: float, stage: int, gather_changes: bool | str) -> None:
        self.module = model
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        self.optimizer = self.engine.optimizer
        held = {"param_memory_budget": "all"} if stage == 3 else {}
        self.zerosync = attach(self.engine, gather_changes=gather_changes, **held)

    def step(self, batch: torch.Tensor) -> float:
        """One optimizer step."""
        loss = gpt.next_byte_loss(self.engine(batch), batch)
        self.zerosync.window.expect_last()
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()


def train(rank: int, hosts: list[Host], port: int, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    """What one rank does: every system makes its step in turn."""
    warnings.filterwarnings("ignore")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    hosts[rank].enter()
    os.environ.update(variables_of_rank(hosts, rank, port))
    prepare_cpu()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    source, _ = text.read_standard_library()
    systems: dict[str, Any] = {}
    for name in options.systems:
        torch.manual_seed(0)
        model = gpt.GPT(**MODELS[options.model], context=CONTEXT)
        systems[name] = DDP(model, rate) if name == "ddp" else ZeRO(model, rate, options.stage, OPTIONS[name])
    draw = torch.Generator().manual_seed(rank)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    snapshots = {name: WeightSnapshot() for name in systems}
    for step in range(options.steps):
        starts = torch.randint(len(source) - options.tokens, (options.batch,), generator=draw).tolist()
        batch = torch.stack([source[start : start + options.tokens].long() for start in starts])
        for name, system in systems.items():
            for group in system.optimizer.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / options.warm_up)
            dist.barrier()
            time.sleep(QUIET)
            sent, began, worked = hosts[rank].sent(os.getpid()), time.perf_counter(), time.process_time()
            loss = system.step(batch)
            dist.barrier()
            seconds, worked = time.perf_counter() - began, time.process_time() - worked
            time.sleep(QUIET)
            measured = {
                "seconds": seconds,
                "processor": worked,
                "loss": loss,
                "sent": hosts[rank].sent(os.getpid()) - sent,
            }
            if name != "ddp":
                report = system.zerosync.report
                measured |= {
                    "counted": report.bytes_sent,
                    "floor": report.floor_bytes,
                    "gathered": report.gathered_bytes,
                    "in_full": report.gathered_bytes_in_full,
                }
                if options.patches and (step + 1) % options.patches == 0:
                    patches = system.zerosync.full_weights(changes_since=snapshots[name])
                    measured["patch"] = sum(len(patch.to_bytes()) for patch in patches) / snapshots[name].nbytes
            rounds[name].append(measured)
        if rank == 0 and step % 25 == 0:
            print(
                f"  step {step}: " + ", ".join(f"{n} {1e3 * rounds[n][-1]['seconds']:.0f}" for n in systems), flush=True
            )
    weights = {
        name: [param.detach() for param in system.module.parameters()]
        if name == "ddp"
        else [weight for _, weight in system.zerosync.full_weights()]
        for name, system in systems.items()
    }
    return {
        "rounds": rounds,
        "digests": {name: digest(of_system) for name, of_system in weights.items()},
        "parameters": sum(weight.numel() for weight in weights[name]),
    }


def digest(weights: list[torch.Tensor]) -> int:
    """A number that stands for the bits of all weights and their places."""
    total = torch.zeros((), dtype=torch.int64)
    for index, weight in enumerate(weights):
        bits = weight.flatten().view(torch.int16).long()
        total += (bits * torch.arange(1, 2 * len(bits), 2)).sum() * (2 * index + 1)
    return int(total)


def main() -> None:
    """Run each learning rate, and write the results."""
    options = _parse()
    require_namespaces()
    before = os.getloadavg()[0]
    place = loopback(options.ranks) if options.where == "loopback" else link(options.ranks, options.rate)
    runs = []
    with place as hosts:
        for index, rate in enumerate(options.rates):
            print(f"learning rate {rate:g}", flush=True)
            runs.append(_summarise(rate, _run(hosts, PORTS + index, rate, options), options))
            print(json.dumps(runs[-1]), flush=True)
    results = {
        "date": datetime.date.today().isoformat(),
        "command": command(),
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {name: version(name) for name in ("zerosync-strategy", "torch", "deepspeed")},
        **{
            name: getattr(options, name)
            for name in ("stage", "where", "rate", "model", "ranks", "batch", "tokens", "steps")
        },
        "warm_up": options.warm_up,
        "load": (before, os.getloadavg()[0]),
        "runs": runs,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    of = f"{'stage-3-' if options.stage == 3 else ''}{options.where}-{options.model}-{options.ranks}-ranks"
    path = options.out / f"{results['date']}-changes-{of}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".md").write_text(_page(results))
    print(path.with_suffix(".md").read_text())
    if not all(run["identical"] for run in runs):
        raise SystemExit("The systems have not ended with the same bits.")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(2, 3), default=2, help="of ZeRO (2)")
    parser.add_argument("--where", choices=("loopback", "link"), default="loopback", help="the network (loopback)")
    parser.add_argument("--rate", default="1gbit", help="of each rank's link, as tc takes it (1gbit)")
    parser.add_argument("--model", choices=tuple(MODELS), default="2m", help="parameters of the GPT (2m)")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (2)")
    parser.add_argument("--batch", type=int, default=4, help="pieces of text in a micro-batch (4)")
    parser.add_argument("--tokens", type=int, default=CONTEXT, help=f"bytes of a piece ({CONTEXT})")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (300)")
    parser.add_argument("--warm-up", type=int, default=20, help="steps in which the learning rate rises (20)")
    parser.add_argument("--rates", default="3e-4,1e-5,1e-6", type=lambda t: [float(each) for each in t.split(",")])
    parser.add_argument("--patches", type=int, default=0, help="take a patch of the weights every so many steps")
    parser.add_argument("--systems", default=["full", "changes"], type=lambda t: t.split(","), help=",".join(SYSTEMS))
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results")
    return parser.parse_args()


def _run(hosts: list[Host], port: int, rate: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("fork")
    connections, processes = [], []
    for rank in range(len(hosts)):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_rank, args=(theirs, rank, hosts, port, rate, options), daemon=True))
        processes[-1].start()
        theirs.close()
        connections.append(ours)
    try:
        results = [connection.recv() for connection in connections]
    finally:
        for process in processes:
            process.kill()
            process.join()
    for rank, result in enumerate(results):
        if isinstance(result, str):
            raise SystemExit(f"rank {rank} failed:\n{result}")
    return results


def _rank(connection: Any, *job: Any) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    try:
        connection.send(train(*job))
    except Exception:
        connection.send(traceback.format_exc())
    signal.pause()


def _summarise(rate: float, results: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Medians and ratios after the warm-up. Bytes are a mean over hosts of the interface's counter."""
    first = min(options.warm_up, options.steps - 1)
    hosts = 1 if options.where == "loopback" else options.ranks
    systems: dict[str, Any] = {}
    for name in options.systems:
        rounds = [result["rounds"][name] for result in results]
        senders = rounds[:1] if hosts == 1 else rounds
        sent = [sum(of_rank[step]["sent"] for of_rank in senders) / options.ranks for step in range(options.steps)]
        own = rounds[0]
        systems[name] = {
            "seconds": [each["seconds"] for each in own],
            "sent": sent,
            "loss": own[-1]["loss"],
            "median_seconds": statistics.median(each["seconds"] for each in own[first:]),
            "processor_seconds": statistics.median(each["processor"] for each in own[first:]),
            "mean_sent": statistics.mean(sent[first:]),
        }
        if name != "ddp":
            systems[name] |= {
                "of_floor": sum(e["counted"] for e in own[first:]) / sum(e["floor"] for e in own[first:]),
                "of_floor_with_warm_up": sum(e["counted"] for e in own) / sum(e["floor"] for e in own),
                "largest_of_floor": max(e["counted"] / e["floor"] for e in own),
                "gather": sum(e["gathered"] for e in own[first:]) / max(1, sum(e["in_full"] for e in own[first:])),
                "patches": [e["patch"] for e in own if "patch" in e][1:],  # the first is of all weights
                "shares": [e["gathered"] / max(1, e["in_full"]) for e in own],
            }
    digests = {result["digests"][name] for result in results for name in options.systems if name != "ddp"}
    reference = "full" if "full" in systems else options.systems[0]
    for system in systems.values():
        pairs = zip(system["seconds"][first:], systems[reference]["seconds"][first:], strict=True)
        system["time_of_full"] = statistics.median(mine / theirs for mine, theirs in pairs)
        system["sent_of_full"] = system["mean_sent"] / systems[reference]["mean_sent"]
    return {
        "rate": rate,
        "parameters": results[0]["parameters"],
        "identical": len(digests) <= 1,
        "systems": systems,
    }


def _page(results: dict[str, Any]) -> str:
    lines = [
        f"# The gather of changes, stage {results['stage']}, {results['ranks']} ranks, {results['where']}, GPT of"
        f" {results['model']}",
        "",
        f"`{results['command']}`",
        "",
        f"{results['date']}, {results['cpu']}, {results['cores']} cores; "
        + ", ".join(f"{name} {number}" for name, number in results["versions"].items())
        + f". bf16 with fp32 master weights, AdamW, real text, {results['steps']} steps, the first {results['warm_up']}"
        " of them warm-up, which medians and means leave out. Load of the machine:"
        f" {results['load'][0]:.1f} at the start, {results['load'][1]:.1f} in the last minute, with the ranks.",
        "",
        "| learning rate | system | bytes of a step, of the minimum | largest step | gather, of full | patch, of the"
        " weights | bytes on the"
        " wire, of full | ms per step | of full's time | ms of a processor per step | same bits as full |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for run in results["runs"]:
        for name, system in run["systems"].items():
            zero = name != "ddp"
            lines.append(
                f"| {run['rate']:g} | {name} | "
                + (f"{system['of_floor']:.3f} | {system['largest_of_floor']:.3f} | " if zero else "| | ")
                + (f"{system['gather']:.3f} | " if name in ("changes", "auto") else "| ")
                + (f"{statistics.mean(system['patches']):.4f} | " if system.get("patches") else "| ")
                + f"{system['sent_of_full']:.3f} | {1e3 * system['median_seconds']:.0f} | "
                + f"{system['time_of_full']:.3f} | {1e3 * system['processor_seconds']:.0f} | "
                + (("yes" if run["identical"] else "NO") if zero else "")
                + " |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
