"""Memory of the host that is used again, where the device is the CPU.

The C library returns large blocks to the system as soon as they are freed; to get as much again costs about as much as
to fill it, because the system clears every page. Allocators of other devices keep what is freed. So blocks that every
optimizer step needs are kept here, and given out again once nobody else has a reference to their storage: a program may
hold on to a gradient that is a view of one, or a collective may still use it.
"""

from __future__ import annotations

import torch

_LARGE_BYTES = 2**18  # what the C library keeps by itself
_UNUSED = 2  # references to a storage that is here alone: the kept tensor's, and the one that asks


class HostMemory:
    """Blocks of one engine."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def free(self) -> None:
        """Give up the blocks that were kept; what is used of them goes with its users."""
        self._kept.clear()

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a flat tensor of any values, of memory that nobody else uses."""
        if device.type != "cpu" or numel * dtype.itemsize < _LARGE_BYTES:
            return torch.empty(numel, dtype=dtype, device=device)
        blocks = self._kept.setdefault((numel, dtype), [])
        for block in blocks:
            if torch._C._storage_Use_Count(block.untyped_storage()._cdata) == _UNUSED:
                return block.view(-1)
        blocks.append(torch.empty(numel, dtype=dtype))
        return blocks[-1].view(-1)
