"""What ZeroSync does with the optimizers of common packages: a table, by the trial that attach() makes of each.

    python benchmarks/optimizer_verdicts.py --output benchmarks/results/<date>-optimizer-verdicts.md

Each class is made with its defaults, and a learning rate where it has none, for two matrices and a vector, or for the
matrices alone. A package that is not installed is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from zerosync_strategy.core.optimizer.problems import kind_problem, needs_whole_parameters

PACKAGES = ("torch.optim", "transformers.optimization", "timm.optim", "pytorch_optimizer", "torchao.optim")
SHAPES = ((24, 16), (16, 24), (24,))


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
    for shapes in (SHAPES, SHAPES[:2]):
        for options in ({}, {"lr": 1e-3}):
            try:
                return cls([torch.nn.Parameter(torch.ones(shape)) for shape in shapes], **options)
            except Exception as error:
                failed = failed or error
    assert failed is not None
    raise failed


def verdict(cls: type) -> tuple[str, str]:
    """Return what ZeroSync does with ``cls``, and why it refuses it."""
    try:
        optimizer = made(cls)
    except Exception as error:
        return "not made", f"{type(error).__name__}: {error}"
    problem = kind_problem(optimizer)
    if problem:
        return "refused", problem
    return ("whole parameters" if needs_whole_parameters(optimizer) else "flat shards"), ""


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--packages", nargs="+", default=PACKAGES)
    options = parser.parse_args()
    lines, count = ["| package | class | what happens | why |", "| --- | --- | --- | --- |"], Counter[str]()
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
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
                what, why = verdict(cls)
            count[what] += 1
            why = " ".join(why.split())[:200].replace("|", "/")
            lines.append(f"| {package} | {cls.__name__} | {what} | {why} |")
            print(lines[-1], flush=True)
    summary = ", ".join(f"{number} {what}" for what, number in count.most_common())
    print(summary)
    if options.output is not None:
        options.output.write_text("\n".join([f"{', '.join(versions)}: {summary}.", "", *lines]) + "\n")


if __name__ == "__main__":
    main()
