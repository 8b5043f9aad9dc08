"""What it costs, while nothing fails, that a hang would end with a verdict: a step's time by arm, and its CPU's.

    python benchmarks/hang_cost.py --base ../before/src

Arms: ``base``, the sources of an earlier revision, with torch's flight recorder off; ``off``, these sources, with it
off; ``recorder``, with torch's flight recorder as it is by default. Each arm is two ranks on gloo in processes of its
own, which live side by side and take turns: some steps each, then the next round, in another order. A round's ratio is
to the first arm of the same round. Medians of rounds, with their quartiles. The CPU's time is that of all threads of
rank 0: waits, and what else runs on the machine, disturb it less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from output import command
from turns import RANKS, Ranks

BACKWARDS = 4
HEAD = "| arm | ms per step | median of the rounds' ratios | quartiles | ms of the CPU | median | quartiles |"
HERE = Path(__file__).resolve().parent
ARMS: dict[str, dict[str, str]] = {
    "base": {"TORCH_FR_BUFFER_SIZE": "0"},
    "off": {"TORCH_FR_BUFFER_SIZE": "0"},
    "recorder": {},
}


def serve(
    turns: Any, stage: int, layers: int, width: int, batch: int, source: str, environment: dict[str, str]
) -> None:
    """Be one rank of one arm: for each number received, make so many steps and send their seconds, and the CPU's."""
    os.environ |= environment
    sys.path.insert(0, source)
    import deepspeed
    import torch
    from torch import nn

    from zerosync_strategy import attach, prepare_cpu

    torch.set_num_threads(1)
    torch.manual_seed(0)
    prepare_cpu()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), dist_init_required=False,
        config={"train_micro_batch_size_per_gpu": batch, "gradient_clipping": 0.0,
                "zero_allow_untested_optimizer": True, "zero_optimization": zero},
    )  # fmt: skip
    attach(engine)
    data = torch.randn(batch, width)
    while steps := turns.recv():
        began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(steps):
            for _ in range(BACKWARDS):
                engine.backward(engine(data).square().mean())
            engine.step()
        turns.send([(time.perf_counter() - began) / steps, (time.process_time() - cpu_began) / steps])


def measure(sources: dict[str, str], rounds: int, steps: int, *model: int) -> dict[str, list[list[float]]]:
    """Return the seconds of a step, and of its CPU, by arm and round."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in sources}
    with tempfile.TemporaryDirectory() as scratch:
        arms = {
            name: Ranks(
                serve, *model, source, environment={k: v or str(Path(scratch, name)) for k, v in ARMS[name].items()}
            )
            for name, source in sources.items()
        }
        for arm in arms.values():
            arm.step(5)
        for _ in range(rounds):
            for name in random.sample(list(arms), len(arms)):
                seconds[name].append(arms[name].step(steps)[0])  # of rank 0
        for arm in arms.values():
            arm.end()
    return seconds


def row(name: str, seconds: dict[str, list[list[float]]]) -> str:
    """A line of the table."""
    cells = [name]
    first = next(iter(seconds.values()))
    for own, others in zip(zip(*seconds[name], strict=True), zip(*first, strict=True), strict=True):
        low, middle, high = statistics.quantiles([a / b for a, b in zip(own, others, strict=True)], n=4)
        cells += [f"{statistics.median(own) * 1e3:.2f}", f"{(middle - 1) * 100:+.2f} %"]
        cells += [f"{(low - 1) * 100:+.2f} to {(high - 1) * 100:+.2f} %"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="src of an earlier revision; without it there is no such arm")
    parser.add_argument("--now", type=Path, default=HERE.parent / "src", help="src of the other arms")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--model", type=int, nargs=3, default=[16, 512, 64], metavar=("LAYERS", "WIDTH", "BATCH"))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5, help="of one turn")
    parser.add_argument("--out", type=Path, default=HERE / "results" / f"{date.today()}-hang-cost")
    options = parser.parse_args()
    sources = {"base": str(options.base.resolve())} if options.base else {}
    sources |= dict.fromkeys([name for name in ARMS if name != "base"], str(options.now.resolve()))
    layers, width, batch = options.model
    import torch

    lines = [
        "# What a verdict costs while nothing fails", "",
        f"{RANKS} ranks on gloo, {layers} x Linear({width}), batch {batch}, {BACKWARDS} backwards per step, torch"
        f" {torch.__version__}, {os.cpu_count()} cores of {platform.machine()}; {options.rounds} rounds of"
        f" {options.steps} steps of each arm, in turns. `{command()}`.", "",
    ]  # fmt: skip
    found = {}
    for stage in options.stages:
        found[stage] = measure(sources, options.rounds, options.steps, stage, layers, width, batch)
        lines += [f"## Stage {stage}", "", HEAD]
        lines += [f"|---|{'---:|' * 6}", *(row(name, found[stage]) for name in found[stage]), ""]
        print("\n".join(lines), flush=True)
    options.out.with_suffix(".md").write_text("\n".join(lines))
    options.out.with_suffix(".json").write_text(
        json.dumps({"arms": ARMS, "model": options.model, "steps": options.steps, "seconds": found})
    )


if __name__ == "__main__":
    main()
