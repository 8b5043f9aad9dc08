"""Train a Lightning project's own model under DDP and on ZeroSync; print how far their weights are apart.

python -m trials.ecosystem.fit PROJECT, in the environment of a row. ``projects/PROJECT.py`` has ``fit(options)``, which
makes a model and data of its project and trains it with a Trainer of these options; ``PLAIN`` is the strategy without
ZeroSync, if it is not "ddp", and ``OPTIONS`` has what ZeroSyncStrategy takes beside stage 3. Ranks are forked from
this process, which has imported it.
"""

import importlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.harness.ranks import RanksError, run_ranks
from trials.ecosystem.runs import REPORT, ratios

RANKS, STEPS, ACCUMULATION, SECONDS = 2, 4, 2, 300
HERE = Path.cwd()  # ranks have folders of their own
PERSISTENT = 64  # elements: biases and norms persist, as in models of their usual size, and weights are sharded


def main() -> None:
    project = importlib.import_module(f"trials.ecosystem.projects.{sys.argv[1]}")
    found: dict[str, Any] = {}
    before = after = {}
    sent: list[float] = []
    for name in ("plain", "2", "3"):
        try:
            outcome = run_ranks(train, project, name, world_size=RANKS, timeout=SECONDS)[0]
        except RanksError as error:
            found[name] = str(error).splitlines()[0].partition("failed first: ")[2] or "did not end in time"
            print(error, file=sys.stderr)
            if name == "plain":
                break
            continue
        if name == "plain":
            before, after = outcome
            found[name] = distance(after, before)
        else:
            found[name] = distance(after, outcome[1])
            sent += ratios(report(name))
    found["sent"] = sent
    print(json.dumps(found))


def train(project: Any, name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """As one rank: train once, with DDP or a stage of ZeroSync; the full parameters before and after."""
    warnings.simplefilter("ignore")
    library = importlib.import_module(getattr(project, "LIBRARY", "lightning.pytorch"))
    seen = watcher(library)
    strategy: Any = getattr(project, "PLAIN", "ddp")
    if name != "plain":
        package = "zerosync_strategy" + ".pytorch_lightning" * (library.__name__ == "pytorch_lightning")
        zero: dict[str, Any] = {"stage": int(name)}
        options: dict[str, Any] = {}
        if name == "3":
            zero["stage3_param_persistence_threshold"] = PERSISTENT
            options = getattr(project, "OPTIONS", {})
        strategy = importlib.import_module(package).ZeroSyncStrategy(config={"zero_optimization": zero}, **options)
        report(name).unlink(missing_ok=True)
        os.environ[REPORT] = f"1:{report(name)}"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    library.seed_everything(1, verbose=False)
    project.fit(
        {
            "accelerator": "cpu", "devices": RANKS, "strategy": strategy, "max_steps": STEPS, "max_epochs": -1,
            "accumulate_grad_batches": ACCUMULATION, "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False, "callbacks": [seen],
        }
    )  # fmt: skip
    if seen.steps != STEPS:
        raise AssertionError(f"{seen.steps} optimizer steps instead of {STEPS}")
    return seen.before, seen.after


def report(name: str) -> Path:
    """The file of the reports of a run."""
    return HERE / f"steps-{name}.log"


def watcher(library: Any) -> Any:
    """A callback that keeps the full parameters where training begins and ends."""

    class Watcher(library.Callback):  # type: ignore[misc]
        before: dict[str, torch.Tensor]
        after: dict[str, torch.Tensor]
        steps = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            type(self).before = full(pl_module)  # some programs copy what they are given
            library.seed_everything(1, verbose=False)  # setting up has drawn numbers, which may be others

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            type(self).after, type(self).steps = full(pl_module), trainer.global_step

    return Watcher()


def full(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that a model has, whole, in double precision."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    found = dict(module.named_parameters())
    with GatheredParameters(list(found.values())):
        return {name: parameter.detach().double().clone() for name, parameter in found.items()}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    if one.keys() != other.keys():
        return float("inf")
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


if __name__ == "__main__":
    main()
