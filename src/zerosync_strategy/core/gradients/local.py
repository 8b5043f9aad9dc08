"""The local gradients of one ZeRO optimizer: their dtype and bytes, and memory for what each step makes of them.

On the CPU that is used again. The C library returns large blocks to the system as soon as they are freed; to get as
much again costs about as much as to fill it, because the system clears every page. Allocators of other devices keep
what is freed. So blocks that every optimizer step needs are kept here, and given out again once nobody else has a
reference to their storage: a program may hold on to a gradient that is a view of one, or a collective may still use it.
Where the CPU has streams, because a test simulates them, that would not tell what they still do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.engine import patches, zero, zero3

_LARGE_BYTES = 2**18  # what the C library keeps by itself
_MOST_KEPT_BYTES = 2**25 - 2**16  # of a block that glibc may learn to keep, on machines of 64 bits
_UNUSED = 2  # references to a storage that is here alone: the kept tensor's, and the one that asks


class LocalGradient:
    """That of one parameter, until ``bucket`` is reduced; of ``nbytes``, once it is there.

    Attributes:
        place: where it is, once this window has collected it: autograd adds to what ``param.grad`` is by itself.
    """

    __slots__ = ("bucket", "nbytes", "param", "place")

    def __init__(self, param: Any, bucket: Any, nbytes: int) -> None:
        self.param, self.bucket, self.nbytes = param, bucket, nbytes
        self.place: torch.Tensor | None = None


class LocalGradients:
    """What the gradients that are not reduced yet have in common.

    Attributes:
        dtype: in which they are accumulated.
        converts: that is another one than the parameters'; then ``param.grad`` is empty between two backwards.
        now, peak_bytes: their bytes, and the most since :meth:`reset_peak`.
        watch: called before bytes are counted.
    """

    def __init__(self, optimizer: Any, streams: Streams) -> None:
        self.dtype = zero.accumulation_dtype(optimizer)
        self.converts = self.dtype != optimizer.dtype
        self.now = self.peak_bytes = 0
        self.watch: Callable[[], None] | None = None
        self._streams = streams
        self._blocks: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def nbytes(self, param: Any) -> int:
        return zero3.full_numel(param) * self.dtype.itemsize

    def count(self, nbytes: int) -> None:
        """Count bytes that are allocated, or freed if negative."""
        if self.watch is not None:
            self.watch()
        self.now += nbytes
        self.peak_bytes = max(self.peak_bytes, self.now)

    def reset_peak(self) -> None:
        self.peak_bytes = self.now

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a flat tensor of any values, of memory that nobody else uses. Not counted."""
        is_small = numel * dtype.itemsize < _LARGE_BYTES
        if is_small or device.type != "cpu" or self._streams.run_on(device):
            return torch.empty(numel, dtype=dtype, device=device)
        blocks = self._blocks.setdefault((numel, dtype), [])
        for block in blocks:
            if torch._C._storage_Use_Count(block.untyped_storage()._cdata) == _UNUSED:
                return block.view(-1)
        blocks.append(torch.empty(numel, dtype=dtype))
        return blocks[-1].view(-1)

    def free_blocks(self) -> None:
        """Free the blocks that nobody uses; others are freed with the last reference to them."""
        self._blocks.clear()


@functools.cache
def keep_freed_memory() -> None:
    """From now on in this process, let glibc keep what is freed, in blocks of up to 32 MiB and 64 MiB in all.

    Its thresholds follow the largest block that it has seen freed. Where an engine keeps its large blocks, it sees
    none, and returns the temporary gradients of each backward to the system: at 35 M parameters 72,000 page faults in a
    step of four backwards. Other C libraries just see a block allocated and freed.
    """
    torch.empty(_MOST_KEPT_BYTES, dtype=torch.uint8, device="cpu")  # whatever the default device is
    patches.install(patches.ALLOCATOR)
