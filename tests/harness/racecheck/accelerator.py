"""DeepSpeed's accelerator for the simulated device."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from tests.harness.racecheck import device


class _Name(str):
    """The simulated device's name. Torch reads "cpu", and whoever writes "cpu" means the host."""


class SimulatedAccelerator(CPU_Accelerator):
    """DeepSpeed's CPU accelerator, with the streams and the pinned memory of ``simulated``."""

    Stream = device.Stream
    Event = device.Event

    def __init__(self, simulated: device.Device) -> None:
        super().__init__()
        self._device = simulated

    def is_synchronized_device(self) -> bool:
        return False

    def use_host_timers(self) -> bool:
        return True

    def resolves_data_dependency(self) -> bool:
        return False

    def handles_memory_backpressure(self) -> bool:
        return False

    def is_fp16_supported(self) -> bool:
        return True  # whatever the CPU has instructions for

    def device_name(self, device_index: int | None = None) -> str:
        return _Name(super().device_name(device_index))

    def current_device_name(self) -> str:
        return _Name(super().current_device_name())

    def stream(self, stream: device.Stream | None) -> AbstractContextManager[None]:
        return self._device.stream(stream)

    def current_stream(self, device_index: int | None = None) -> device.Stream:
        return self._device.current

    def default_stream(self, device_index: int | None = None) -> device.Stream:
        return self._device.default

    def synchronize(self, device_index: int | None = None) -> None:
        self._device.synchronize()

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        return self._device.to_host_memory(tensor)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._device.is_host_memory(tensor)
