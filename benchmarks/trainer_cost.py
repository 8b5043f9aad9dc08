"""The CPU's time of a small step under Lightning's Trainer, where the strategy's overhead is all there is.

    python benchmarks/trainer_cost.py

ZeroSync's strategy beside Lightning's DeepSpeedStrategy on each stage; ``zerosync-3-held`` has
``param_memory_budget="all"``. Each system is two ranks on gloo in processes of its own, which live side by side and
take turns, some steps each, in another order in every round. Counted is the time of all threads of a rank, which waits
and what else runs disturb less than the time of a clock, and that of the thread that trains: the rest is gloo's. A
round's ratio is to the stock strategy in the same round.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import random
import statistics
import time
import warnings
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from output import command
from turns import RANKS, Ranks

LAYERS, WIDTH = 5, 64
SYSTEMS = {1: ("stock-1", "zerosync-1"), 2: ("stock-2", "zerosync-2"), 3: ("stock-3", "zerosync-3", "zerosync-3-held")}
HEAD = (
    "| system | N | ms of the CPU per step | median of the rounds' ratios to stock | quartiles"
    " | the thread that trains, ms | median ratio |"
)
HERE = Path(__file__).resolve().parent


def serve(turns: Any, system: str, accumulate: int, environment: dict[str, str]) -> None:
    """Be one rank of one system: for each number received, make so many steps and send the seconds of one.

    Sent are those of all threads and those of this one.
    """
    os.environ |= environment
    warnings.filterwarnings("ignore")
    for name in ("DeepSpeed", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn

    from zerosync_strategy import ZeroSyncStrategy
    from zerosync_strategy.lightning import DeepSpeedAnyDeviceStrategy

    torch.set_num_threads(1)
    torch.manual_seed(0)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layers(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Loader:
        """Asks for a turn with its first micro-batch. It has a length, so that nothing is fetched ahead."""

        def __len__(self) -> int:
            return 10**9

        def __iter__(self) -> Iterator[torch.Tensor]:
            batch = torch.randn(1, WIDTH)
            while steps := turns.recv():
                began = time.process_time(), time.thread_time()
                for _ in range(steps * accumulate):
                    yield batch
                turns.send(((time.process_time() - began[0]) / steps, (time.thread_time() - began[1]) / steps))
            os._exit(0)  # in mid-epoch

    kind, stage, *held = system.split("-")
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": int(stage), "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    if kind == "stock":
        strategy: Any = DeepSpeedAnyDeviceStrategy(config=config)
    else:
        strategy = ZeroSyncStrategy(config=config, **({"param_memory_budget": "all"} if held else {}))
    trainer = Trainer(
        accelerator="cpu", strategy=strategy, devices=RANKS, accumulate_grad_batches=accumulate, max_epochs=1,
        use_distributed_sampler=False, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(Module(), Loader())


def measure(systems: tuple[str, ...], accumulate: int, rounds: int, steps: int) -> dict[str, list[list[float]]]:
    """Return the seconds of a step by system and round: of all threads and of the one that trains."""
    teams = {system: Ranks(serve, system, accumulate) for system in systems}
    for team in teams.values():
        team.step(20)
    seconds: dict[str, list[list[float]]] = {system: [] for system in systems}
    for _ in range(rounds):
        for system in random.sample(systems, len(systems)):
            seconds[system].append(list(map(statistics.mean, zip(*teams[system].step(steps), strict=True))))
    for team in teams.values():
        team.end()
    return seconds


def rows(seconds: dict[str, list[list[float]]], accumulate: int) -> list[str]:
    """The lines of the table for systems that took turns, the stock one first."""
    stock, lines = next(iter(seconds.values())), []
    for system, own in seconds.items():
        (low, middle, high), (_, of_thread, _) = (
            statistics.quantiles([a[which] / b[which] for a, b in zip(own, stock, strict=True)], n=4)
            for which in range(2)
        )
        all_threads, training = (f"{statistics.median(column) * 1e3:.2f}" for column in zip(*own, strict=True))
        cells = [system, accumulate, all_threads, f"{middle:.3f}", f"{low:.3f} to {high:.3f}", training]
        cells.append(f"{of_thread:.3f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1, 4], help="micro-batches of a step")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=40, help="of one turn, with one micro-batch each; fewer with more")
    parser.add_argument("--output", type=Path, help="write FILE.json and FILE.md")
    options = parser.parse_args()
    import torch

    lines = [
        f"# {date.today()}: the CPU's time of a small step under Lightning's Trainer", "",
        f"{RANKS} ranks on gloo, {LAYERS} x Linear({WIDTH}) ({LAYERS * WIDTH * (WIDTH + 1) / 1000:.1f} k parameters),"
        f" AdamW, N micro-batches of one row per step; {options.rounds} rounds of {options.steps} backwards of each"
        f" system, in turns. torch {torch.__version__}, python {platform.python_version()},"
        f" {os.cpu_count()} cores of {platform.machine()}.", "",
        f"    {command()}", "",
        HEAD, "|---|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    found = {}
    print("\n".join(lines), flush=True)
    for stage in options.stages:
        for accumulate in options.accumulate:
            steps = max(1, options.steps // accumulate)
            seconds = measure(SYSTEMS[stage], accumulate, options.rounds, steps)
            found[f"{stage}, {accumulate}"] = seconds
            lines += rows(seconds, accumulate)
            print("\n".join(rows(seconds, accumulate)), flush=True)
    if options.output:
        options.output.with_suffix(".md").write_text("\n".join(lines) + "\n")
        options.output.with_suffix(".json").write_text(json.dumps({"seconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
