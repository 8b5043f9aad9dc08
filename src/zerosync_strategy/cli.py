"""The command ``zerosync``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from zerosync_strategy.version import __version__


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with ``arguments``, or those of the process."""
    parser = argparse.ArgumentParser(prog="zerosync", description="Gradient synchronisation for DeepSpeed ZeRO.")
    parser.add_argument("--version", action="version", version=f"zerosync {__version__}")
    parser.parse_args(arguments)
    parser.print_help()
