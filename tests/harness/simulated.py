"""A rank's program on the simulated device (``racecheck``) with the strict communicator (``strict.py``).

From when the program has a process group until it ends, each operation and each wait goes to the race checker, and each
collective has NCCL's rules. What they find is the program's failure. A program that simulates a device itself before it
has a process group gets the communicator alone.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.harness.racecheck import Simulation, simulate
from tests.harness.racecheck.recorder import running
from tests.harness.strict import strict


class RacesFound(AssertionError):
    """Accesses on the simulated device that nothing orders."""


def on_simulated_device(program: Callable[[], Any]) -> Any:
    """Call ``program`` and return what it returns.

    Raises:
        RacesFound, StrictError: after it has returned.
    """
    device = ExitStack()
    simulations: list[Simulation] = []

    def leave() -> None:
        device.close()
        found = [str(finding) for simulation in simulations for finding in simulation.findings]
        simulations.clear()
        if found:
            raise RacesFound(f"{len(found)} on the simulated device:\n" + "\n".join(found[:20]))

    def initialize(*args: Any, **kwargs: Any) -> None:
        stock_initialize(*args, **kwargs)
        if running() is None:
            simulations.append(device.enter_context(simulate()))
        device.enter_context(strict())

    def destroy(group: Any = None) -> None:
        if group in (None, dist.group.WORLD):
            leave()
        stock_destroy(group)

    stock_initialize, stock_destroy = dist.init_process_group, dist.destroy_process_group
    with ExitStack() as patched, device:
        for module in (dist, distributed_c10d):
            patched.enter_context(mock.patch.object(module, "init_process_group", initialize))
            patched.enter_context(mock.patch.object(module, "destroy_process_group", destroy))
        value = program()
        leave()
        return value
