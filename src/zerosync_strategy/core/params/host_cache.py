"""ZeRO-3: parameters kept in full in the memory of the host, and copied from there instead of gathered again.

The first gather of a parameter in a window leaves a copy in host memory, pinned on devices that are not the CPU, and
later gathers of the window copy it back: over the bus, and not over the network. The idea is that of FCDP (arXiv
2602.06499). A copy is made and read on the stream on which its parameter is gathered: neither waits for the other.

Torch allocates pinned memory in blocks of a power of two: 33 MiB in one block take 64. So a copy lies in several
blocks, one after the other, which are a sixteenth larger at most (:func:`pinned_blocks`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.params.copies import Copies

_PAGE = 4096  # bytes that a block has at least


class HostCache(Copies[list[torch.Tensor]]):
    """Full parameters of one ZeRO-3 engine in host memory, flat and in parts, one for each block of memory.

    :attr:`loaded_bytes`: copied back to the device since the last :meth:`reset_counts`.
    """

    def __init__(self, limit: int | None, streams: Streams) -> None:
        super().__init__(limit)
        self._streams = streams
        self.loaded_bytes = 0

    def bytes_of(self, param: Any) -> int:
        return sum(self._blocks_of(param))

    def _blocks_of(self, param: Any) -> list[int]:
        nbytes = zero3.full_bytes(param)
        return pinned_blocks(nbytes) if self._streams.concurrent else [nbytes]

    def _allocate(self, param: Any) -> list[torch.Tensor]:
        values, left = [], zero3.full_numel(param)
        with torch.inference_mode(False):
            for nbytes in self._blocks_of(param):
                numel = min(left, nbytes // param.dtype.itemsize)
                values.append(self._streams.host_memory(nbytes // param.dtype.itemsize, param.dtype)[:numel])
                left -= numel
        return values

    def keep(self, params: Iterable[Any]) -> None:
        """``params`` have just been gathered, on the current stream: copy those that are to be kept."""
        for param in params:
            if (values := self.to_fill(param)) is not None:
                _store(param, values)

    def renew(self, param: Any) -> None:
        _store(param, self._copies[param].values)

    def count_loaded(self, params: Iterable[Any]) -> None:
        self.loaded_bytes += sum(map(zero3.full_bytes, params))

    def choose(self, params: set[Any], leaving: Iterable[Any]) -> None:
        super().choose(params, leaving)
        self._streams.give_host_memory_back()

    def reset_counts(self) -> None:
        super().reset_counts()
        self.loaded_bytes = 0


def _store(param: Any, parts: list[torch.Tensor]) -> None:
    sizes = [part.numel() for part in parts]
    torch._foreach_copy_(parts, param.data.reshape(-1).split(sizes), non_blocking=True)


def pinned_blocks(nbytes: int) -> list[int]:
    """Return powers of two, the largest first, whose sum is ``nbytes``, a sixteenth of it more, or a page."""
    blocks, spare, left = [], nbytes // 16, nbytes
    while left > 0:
        block = max(_PAGE, 1 << (left - 1).bit_length())
        if block - left > spare and block > _PAGE:
            block //= 2
        blocks.append(block)
        left -= block
    return blocks
