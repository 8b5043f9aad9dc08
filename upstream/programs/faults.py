"""Runs programs that show what stock gets wrong, and prints how far each is from plain torch."""

import os
from collections.abc import Callable, Collection, Iterable

import torch


def report(programs: Iterable[Callable[[], float]], names: Collection[str], prefix: str = "") -> None:
    """Print on the first rank what each of ``programs`` returns, or the error that it raises.

    Args:
        names: of those to run.
        prefix: of each line.
    """
    for program in programs:
        if program.__name__ in names:
            torch.manual_seed(0)
            try:
                found = f"{program():.1e} from plain torch"
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            if os.environ.get("RANK", "0") == "0":
                print(f"{prefix}{program.__name__}: {found}", flush=True)
