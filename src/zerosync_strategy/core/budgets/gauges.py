"""How much memory a rank uses, and how much it may."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

_STATUS = Path("/proc/self/status")
_TAKEN = ("active_bytes", "inactive_split_bytes")  # of torch's statistics


class Gauge(Protocol):
    """Bytes of the memory that budgets are for."""

    def used(self) -> int:
        """Return what is in use now."""

    def peak(self) -> int:
        """Return the most that was in use at once, ever, or since others have reset it."""


class DeviceGauge:
    """What torch's allocator has taken of a GPU and cannot give back, or give out again whatever is asked for.

    Of its reserved memory that is: the blocks in use, those that wait for a stream, and the free parts of segments that
    are in use elsewhere. Segments that are free as a whole are not counted: they serve the next request, or go back to
    the device before the allocator gives up.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def used(self) -> int:
        stats = torch.cuda.memory_stats(self._device)
        return sum(stats.get(f"{kind}.all.current", 0) for kind in _TAKEN)

    def peak(self) -> int:
        # The two have had their peaks at different moments, perhaps; all that was reserved is more than both at any.
        stats = torch.cuda.memory_stats(self._device)
        return min(sum(stats.get(f"{kind}.all.peak", 0) for kind in _TAKEN), stats.get("reserved_bytes.all.peak", 0))

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

    @staticmethod
    def _read(field: str) -> int:
        (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024


def gauge_of(device: torch.device) -> Gauge:
    """Return the gauge of the memory of ``device``."""
    return DeviceGauge(device) if device.type == "cuda" else ProcessGauge()
