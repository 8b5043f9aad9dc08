"""Compare ZeroSync with DeepSpeed, DDP and FSDP2, driven directly and under Lightning's Trainer, on CPU. Needs root.

    python benchmarks/compare.py --where loopback --model 10m
    python benchmarks/compare.py --where link --model 35m --accumulate 4 --systems ddp,lightning-stock-2,zerosync-2
    python benchmarks/compare.py --where loopback --model 10m --budget-curve

Measured are the time of one optimizer step and what the network interface has counted. Each number of micro-batches is
one run, in which all systems live side by side, each in processes of its own, and take turns: one optimizer step each,
then the next round. See README.md here.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hosts import link, loopback, require_namespaces
from output import command, draw, processor, write_markdown

HERE = Path(__file__).resolve().parent
SYSTEMS = (
    "ddp",
    "stock-1",
    "zerosync-1",
    "lightning-stock-1",
    "lightning-zerosync-1",
    "stock-2",
    "coalesced-2",
    "zerosync-2",
    "fsdp2-2",
    "lightning-stock-2",
    "lightning-zerosync-2",
    "lightning-fsdp2-2",
    "stock-3",
    "coalesced-3",
    "zerosync-3",
    "zerosync-3-held",
    "fsdp2-3",
    "lightning-stock-3",
    "lightning-zerosync-3",
    "lightning-zerosync-3-held",
    "lightning-fsdp2-3",
)
BUDGET_CURVE = tuple(f"zerosync-2@{percent}" for percent in (0, 20, 40, 60, 80, "all"))
ON_NODES = (
    *("zerosync-2-flat", "zerosync-2-node", "zerosync-3-flat", "zerosync-3-each-flat"),
    *("zerosync-3-node", "zerosync-3-each"),
    *("zerosync-3-node-params", "fsdp2-3-hybrid", "fsdp2-3-hybrid-scatter", "stock-3-hpz"),
)
WITH_MUON = (
    "ddp-muon",
    *(
        f"zerosync-{variant}"
        for variant in ("1-muon", "1-muon-flat", "2-muon", "2-muon-flat", "2-muon-node", "3-muon-held")
    ),
    *(f"stock-{stage}-muon" for stage in (1, 2, 3)),
)
TOLERANCE = 0.02  # of how far training has moved a parameter
# Of Muon: its step in bf16 makes 7 % of a gradient's last places, in plain torch, too.
MUON_TOLERANCE = 0.15
# Read when torch and DeepSpeed are imported. No name server answers in a namespace, and none is needed.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def main() -> None:
    """Run the comparison and write its results."""
    options = _parse()
    if options.plot:
        _draw(json.loads(options.plot.read_text()), options.plot.with_suffix(".png"))
        return
    require_namespaces()
    os.environ.update(ENVIRONMENT)
    from conductor import measure  # takes seconds: it imports what the systems need

    place = (
        loopback(options.ranks) if options.where == "loopback" else link(options.ranks, options.rate, options.per_host)
    )
    runs = []
    with tempfile.TemporaryDirectory() as scratch, place as hosts:
        for accumulate in options.accumulate:
            print(f"{accumulate} micro-batch(es) per optimizer step", flush=True)
            run = measure(
                hosts, options.systems, options.model, accumulate, options.batch, options.rounds, options.in_a_row,
                options.count_tensors, Path(scratch),
            )  # fmt: skip
            _judge(run)
            runs.append(run)
    results = _describe(options, runs)
    name = f"{results['date']}-{options.where}-{options.model}"
    name += f"-{options.ranks // options.per_host}x{options.per_host}" if options.per_host > 1 else ""
    name += f"-batch-{options.batch}" if options.batch > 1 else ""
    name += "-muon" if set(options.systems) & set(WITH_MUON) else ""
    name += "-budget" if options.budget_curve else ""
    name += "-tensors" if options.count_tensors else ""
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{name}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    write_markdown(results, path.with_suffix(".md"))
    print("\n" + path.with_suffix(".md").read_text())
    _draw(results, path.with_suffix(".png"))
    _check(runs)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", choices=("loopback", "link"), default="loopback", help="the network (loopback)")
    parser.add_argument("--rate", default="1gbit", help="of each rank's link, as tc takes it (1gbit)")
    parser.add_argument("--model", choices=("10m", "35m"), default="10m", help="parameters of the GPT (10m)")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (2)")
    parser.add_argument("--per-host", type=int, default=1, help="ranks on each host of a link (1)")
    parser.add_argument("--accumulate", type=_numbers, default=[1, 4, 8], help="micro-batches per step (1,4,8)")
    parser.add_argument("--batch", type=int, default=1, help="pieces of 32 tokens in a micro-batch (1)")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each system, after 2 others (5)")
    parser.add_argument("--in-a-row", type=int, default=1, help="steps of a system in each of its turns (1)")
    parser.add_argument("--systems", type=_systems, default=list(SYSTEMS), help=f"({','.join(SYSTEMS)})")
    parser.add_argument("--count-tensors", action="store_true", help="automatic budgets go by the memory of tensors")
    parser.add_argument("--budget-curve", action="store_true", help="ZeRO-2 by grad_memory_budget, instead of systems")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results (beside this file)")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="only draw the picture of these results")
    options = parser.parse_args()
    if options.ranks < 2 or min(options.rounds, options.in_a_row, options.batch) < 1:
        parser.error("--ranks takes 2 or more, and --rounds, --in-a-row and --batch 1 or more")
    if options.per_host < 1 or options.ranks % options.per_host:
        parser.error(f"--per-host takes a number that divides the {options.ranks} ranks")
    if options.budget_curve:
        options.systems = list(BUDGET_CURVE)
    return options


def _numbers(text: str) -> list[int]:
    numbers = [int(number) for number in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"takes numbers from 1, got {text!r}")
    return numbers


def _systems(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in SYSTEMS + ON_NODES + WITH_MUON and not re.fullmatch(r"zerosync-3@(\d+|all|auto\w+)", name):
            raise argparse.ArgumentTypeError(
                f"unknown system {name!r}; known: {', '.join(SYSTEMS + ON_NODES + WITH_MUON)}"
            )
    return names


def _describe(options: argparse.Namespace, runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "command": command(),
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {name: version(name) for name in ("zerosync-strategy", "torch", "deepspeed", "lightning")},
        "where": options.where,
        "rate": options.rate,
        "model": options.model,
        "parameters": runs[0]["parameter_bytes"] // 4,
        "ranks": options.ranks,
        "per_host": options.per_host,
        "batch": options.batch,
        "rounds": options.rounds,
        "in_a_row": options.in_a_row,
        "counts_tensors": options.count_tensors,
        "budget_curve": options.budget_curve,
        "runs": runs,
    }


def _draw(results: dict[str, Any], path: Path) -> None:
    try:
        draw(results, path)
    except ImportError:
        again = f"python benchmarks/compare.py --plot {path.with_suffix('.json')}"
        print(f"No picture: matplotlib is not installed. Install it (pip install matplotlib), then: {again}")


def _judge(run: dict[str, Any]) -> None:
    """Remark of each system that does not compute what the reference computes."""
    for name, system in run["systems"].items():
        tolerance = MUON_TOLERANCE if "-muon" in name else TOLERANCE
        system["remark"] = None
        if system["difference_between_ranks"]:
            system["remark"] = f"has ranks whose parameters differ by up to {system['difference_between_ranks']:.1e}"
        elif not system["difference"] <= tolerance * run["moved"]:
            system["remark"] = (
                f"computes something else: at the end its parameters differ from those of {run['reference']} by up to"
                f" {system['difference']:.1e}, where training moved one by up to {run['moved']:.1e}"
            )


def _check(runs: list[dict[str, Any]]) -> None:
    for run in runs:
        for name, system in run["systems"].items():
            # Under Lightning, stock divides accumulated gradients twice (docs/results.md), and its own Muon is another:
            # another scale, Nesterov's momentum. The remark is enough.
            known = name.startswith("lightning-stock") or (name.startswith("stock") and name.endswith("-muon"))
            known = known and not system["difference_between_ranks"]
            if system["remark"] and not known:
                raise SystemExit(f"With {run['accumulate']} micro-batch(es) {name} {system['remark']}.")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
