"""Run an unmodified script, such as one with the Hugging Face Trainer, under ZeroSync.

    accelerate launch --config_file zerosync.yaml -m zerosync_strategy.accelerate.run script.py [ARGUMENT ...]
    accelerate launch --config_file zerosync.yaml -m zerosync_strategy.accelerate.run -m module [ARGUMENT ...]

Every DeepSpeed configuration that the script uses trains with ZeroSync, with a ``"zerosync"`` block or without.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from zerosync_strategy.accelerate.install import install

USAGE = "python -m zerosync_strategy.accelerate.run (SCRIPT | -m MODULE) [ARGUMENT ...]"


def main() -> None:
    """Run the script or module that the command line names, as if Python had been started with it."""
    arguments = sys.argv[1:]
    as_module = arguments[:1] == ["-m"]
    if as_module:
        arguments = arguments[1:]
    if not arguments:
        raise SystemExit(f"Nothing to run. Usage, under 'accelerate launch': {USAGE}")
    install(always=True)
    sys.argv = arguments
    if as_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    script = Path(arguments[0])
    if not script.is_file():
        raise SystemExit(f"{script} is not a file. Usage, under 'accelerate launch': {USAGE}")
    sys.path[0] = str(script.resolve().parent)  # replaces this module's folder, or the current one
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
