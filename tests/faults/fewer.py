"""A rank of three is killed, in a step or while it writes a checkpoint; the two others load what was last complete.

For torchrun, too, where the agent that started it is killed with it: arguments are where, directory, number of the
agent. The last agent's rank is killed; the first one's saves the parameters at the end there.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from examples import elastic
from tests.harness.oracle import full_parameters
from zerosync_strategy.core.checkpoints import dcp

KILLED_IN = 12
"""The step; checkpoints are written after steps 4 and 9, and the next one after step 14."""
STEPS = 20


def train(where: str, directory: Path, number: int, killed: tuple[int, ...] = ()) -> None:
    """Train to the end, as number 0, 1 or 2, of which the last kills these processes and itself."""
    is_last = number == 2

    def die() -> None:
        for process in (*killed, os.getpid()):
            os.kill(process, signal.SIGKILL)

    def begun(step: int) -> None:
        with (directory / f"agent{number}").open("a") as log:
            print(step, os.environ["WORLD_SIZE"], file=log)
        if is_last and step == KILLED_IN and where == "step":
            die()

    write = dcp.write

    def write_half(folder: Path, rank: int, content: Any) -> Any:
        state = write(folder, rank, content)
        if is_last and where == "write" and (directory / "run" / "global_step10").exists():
            os.truncate(folder / dcp.name_of(rank), state.size // 2)
            die()
        return state

    dcp.write = write_half
    parameters = full_parameters(elastic.train(directory / "run", STEPS, begun))
    if number == 0:
        torch.save(parameters, directory / "parameters.pt")


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), (os.getppid(),))
