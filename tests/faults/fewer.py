"""For torchrun: a rank of three is killed, with the agent that started it, in a step or while it writes a checkpoint.

Arguments: where, directory, number of the agent. The last agent's rank is killed; the first one's saves the parameters
at the end there.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch

from examples import elastic
from tests.harness.oracle import full_parameters
from zerosync_strategy.core.checkpoints import dcp

KILLED_IN = 12
"""The step; checkpoints are written after steps 4 and 9, and the next one after step 14."""
STEPS = 20


def die() -> NoReturn:
    for process in (os.getppid(), os.getpid()):
        os.kill(process, signal.SIGKILL)
    raise AssertionError("unreachable")


if __name__ == "__main__":
    where, directory, agent = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    is_last = agent == 2

    def begun(step: int) -> None:
        with (directory / f"agent{agent}").open("a") as log:
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
    module = elastic.train(directory / "run", STEPS, begun)
    parameters = full_parameters(module)
    if agent == 0:
        torch.save(parameters, directory / "parameters.pt")
