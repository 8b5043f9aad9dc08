"""What ZeroSync does with the optimizers of common packages: a table, by the trial that attach() makes of each.

    python benchmarks/optimizer_verdicts.py --output benchmarks/results/<date>-optimizer-verdicts.md

Each class is made with its defaults, and a learning rate or a number of steps where it has none, for two matrices and a
vector, of which Muon has the matrices, or for the matrices alone, or for a module. It has a process of its own and
``--seconds`` of processor time. A package that is not installed is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import inspect
import io
import itertools
import multiprocessing
import resource
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from output import processor

from zerosync_strategy.core.optimizer import problems
from zerosync_strategy.core.optimizer.probe import probe

PACKAGES = ("torch.optim", "transformers.optimization", "timm.optim", "pytorch_optimizer", "torchao.optim")
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"lr": 1e-3}, {"num_iterations": 100})


def classes(package: str) -> Iterator[type]:
    """Yield the optimizers that ``package`` offers, each once."""
    module = importlib.import_module(package)
    found = {
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    top = package.partition(".")[0]
    yield from sorted((cls for cls in found if cls.__module__.startswith(top)), key=lambda cls: cls.__name__.lower())


def made(cls: Any) -> Any:
    """Return an optimizer of ``cls``.

    Raises:
        Exception: its own, where it cannot be made so.
    """
    failed: Exception | None = None
    module = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Linear(24, 16, bias=False))
    matrices = [param for param in module.parameters() if param.dim() == 2]
    others = [param for param in module.parameters() if param.dim() < 2]
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    for given, options in itertools.product(([*matrices, *others], matrices, groups, module), OPTIONS):
        try:
            return cls(given, **options)
        except Exception as error:
            failed = failed or error
    assert failed is not None
    raise failed


def verdict(cls: type) -> tuple[str, str, str]:
    """Return what ZeroSync does with ``cls``, what the trial found, and why it is refused or not made."""
    try:
        optimizer = made(cls)
    except Exception as error:
        return "not made", "", f"{type(error).__name__}: {error}"
    once = functools.cache(probe)
    scope, detail = once(optimizer)
    found = f"{scope.value}: {detail}" if detail else scope.value
    with patch.object(problems, "probe", once):
        kind = problems.kind_of(optimizer)
        if problem := kind.problem:
            return "refused", found, problem
        return ("whole parameters" if kind.needs_whole else "flat shards"), found, ""


def _answer(cls: type, seconds: int, answers: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answers.send(verdict(cls))


def verdict_within(cls: type, seconds: int) -> tuple[str, str, str]:
    """Return :func:`verdict`, of a process of its own that is ended after ``seconds`` of processor time."""
    context = multiprocessing.get_context("fork")  # which has imported everything
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(cls, seconds, theirs))
    process.start()
    theirs.close()
    try:
        if ours.poll(10 * seconds):
            return ours.recv()
        return "no verdict", "", f"its trial has no end within {10 * seconds} s: use elementwise_optimizer"
    except EOFError:  # it has ended without an answer
        process.join()
        if process.exitcode != -signal.SIGXCPU:
            return "ended", "", f"its process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
    return "no verdict", "", f"its trial takes more than {seconds} s of processor time: use elementwise_optimizer"


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--packages", nargs="+", default=PACKAGES)
    parser.add_argument("--seconds", type=int, default=300, help="of processor time for a class (default: 300)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("package", "class", "what happens", "an update depends on", "why", "s")
    lines, count = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)], Counter[str]()
    versions = []
    for package in options.packages:
        top = package.partition(".")[0]
        try:
            versions.append(f"{top} {version(top.replace('_', '-'))}")
            found = list(classes(package))
        except ImportError as error:
            print(f"{package}: {error}")
            continue
        for cls in found:
            before = used()
            what, *texts = verdict_within(cls, options.seconds)
            count[what] += 1
            scope, why = (" ".join(text.split())[:200].replace("|", "/") for text in texts)
            lines.append(f"| {package} | {cls.__name__} | {what} | {scope} | {why} | {used() - before:.1f} |")
            print(lines[-1], flush=True)
    summary = ", ".join(f"{number} {what}" for what, number in count.most_common())
    print(summary)
    if options.output is not None:
        head = f"{time.strftime('%Y-%m-%d')}, {processor()}, {', '.join(versions)}: {summary}."
        options.output.write_text("\n".join([head, "", *lines]) + "\n")


def used() -> float:
    """Return the processor time of processes that this one has started, and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
