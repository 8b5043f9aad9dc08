"""How much memory a rank uses, and how much it may."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

_STATUS = Path("/proc/self/status")


class Gauge(Protocol):
    """Bytes of the memory that budgets are for."""

    def used(self) -> int:
        """Return what is in use now."""

    def peak(self) -> int:
        """Return the most that was in use at once since :meth:`restart_peak`, which others may call too, or ever."""

    def restart_peak(self) -> None:
        """Begin the peak anew."""


class DeviceGauge:
    """What torch's allocator has given out on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def used(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def restart_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def limit(self) -> int:
        """Return what the process may use in all: what is free, and what its allocator has."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device)


class ProcessGauge:
    """The resident memory of this process. Linux."""

    def used(self) -> int:
        return self._read("VmRSS:")

    def peak(self) -> int:
        return self._read("VmHWM:")

    def restart_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    @staticmethod
    def _read(field: str) -> int:
        (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024


def gauge_of(device: torch.device) -> Gauge:
    """Return the gauge of the memory of ``device``."""
    return DeviceGauge(device) if device.type == "cuda" else ProcessGauge()
