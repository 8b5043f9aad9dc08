"""The simulated device as DeepSpeed sees it."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from zerosync_strategy.racecheck import simulation


class SimulatedAccelerator(CPU_Accelerator):
    """DeepSpeed's CPU accelerator, but with streams."""

    def __init__(self, running: simulation.Simulation) -> None:
        super().__init__()
        self._simulation = running

    def is_synchronized_device(self) -> bool:
        return False

    def use_host_timers(self) -> bool:
        return True

    def resolves_data_dependency(self) -> bool:
        return False

    def handles_memory_backpressure(self) -> bool:
        return False

    @property
    def Stream(self) -> type[simulation.Stream]:
        return simulation.Stream

    @property
    def Event(self) -> type[simulation.Event]:
        return simulation.Event

    def stream(self, stream: simulation.Stream | None) -> AbstractContextManager[None]:
        return self._simulation.stream(stream)

    def current_stream(self, device_index: int | None = None) -> simulation.Stream:
        return self._simulation.current

    def default_stream(self, device_index: int | None = None) -> simulation.Stream:
        return self._simulation.default

    def synchronize(self, device_index: int | None = None) -> None:
        self._simulation.synchronize()

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        return self._simulation.to_host_memory(tensor)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._simulation.is_host_memory(tensor)
