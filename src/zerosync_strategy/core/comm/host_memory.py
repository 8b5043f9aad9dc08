"""Memory of the host that is used again, where the device is the CPU.

The C library returns large blocks to the system as soon as they are freed; to get as much again costs about as much as
to fill it, because the system clears every page. Allocators of other devices keep what is freed. So blocks that every
optimizer step needs are kept here, and given out again once nobody else has a reference to their storage: a program may
hold on to a gradient that is a view of one, or a collective may still use it. What a backward itself gets and frees,
the C library is made to keep.
"""

from __future__ import annotations

import functools

import torch

from zerosync_strategy.core.engine import patches

_LARGE_BYTES = 2**18  # what the C library keeps by itself
_MOST_KEPT_BYTES = 2**25 - 2**16  # of a block that glibc may learn to keep, on machines of 64 bits
_UNUSED = 2  # references to a storage that is here alone: the kept tensor's, and the one that asks


@functools.cache
def keep_freed_memory() -> None:
    """From now on in this process, let glibc keep what is freed, in blocks of up to 32 MiB and 64 MiB in all.

    Its thresholds follow the largest block that it has seen freed. Where an engine keeps its large blocks, it sees
    none, and returns the temporary gradients of each backward to the system: at 35 M parameters 72,000 page faults in a
    step of four backwards. Other C libraries just see a block allocated and freed.
    """
    torch.empty(_MOST_KEPT_BYTES, dtype=torch.uint8, device="cpu")  # whatever the default device is
    patches.install(patches.ALLOCATOR)


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
