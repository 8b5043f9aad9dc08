"""ZeRO-3: parameters kept in full in the memory of the host, and copied from there instead of gathered again.

The first gather of a parameter in a window leaves a copy in host memory, pinned on devices that are not the CPU, and
later gathers of the window copy it back: over the bus, and not over the network. An optimizer step ends what it
changes; a copy of a parameter that no optimizer trains serves for the whole run (R4). The idea, of full parameters
cached in host memory between forward and backward, is that of FCDP (arXiv 2602.06499).

Pinned memory comes in blocks of a power of two, by torch's allocator: a parameter of 33 MiB in one block takes 64. So
its copy lies in several blocks, one after the other, which are a sixteenth larger at most (:func:`pinned_blocks`).

A copy is made and read on the stream on which its parameter is gathered, so that neither waits for the other. It holds
until the parameter's shards are written, by whomever: each write is counted (``Record.writes``), alike on all
ranks. So what has a copy is known on all of them without a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.engine import zero3

_PAGE = 4096  # bytes that a block has at least


@dataclass
class _Copy:
    """The memory of one parameter's copy.

    Attributes:
        values: flat, in parts, one for each block of memory.
        nbytes: of the blocks.
        writes: to the parameter's shards before it was made; ``None``: it has no values.
    """

    values: list[torch.Tensor]
    nbytes: int
    writes: int | None = None


class HostCache:
    """Full parameters of one ZeRO-3 engine in host memory.

    Args:
        limit: bytes of the memory of all copies; ``None``: no limit.
        streams: of the engine.

    Attributes:
        limit: as given.
        chosen: the parameters to keep; ``None`` while it is unknown which are gathered more than once: whatever comes
            first and fits.
        peak_bytes: the most bytes of copies at once since the last :meth:`reset_counts`.
        loaded_bytes: copied back to the device since then.
    """

    def __init__(self, limit: int | None, streams: Streams) -> None:
        self.limit = limit
        self._streams = streams
        self._copies: dict[Any, _Copy] = {}
        self._bytes = self.peak_bytes = self.loaded_bytes = 0
        self._at_begin: dict[Any, int | None] = {}  # what had a copy when the window began
        self.chosen: set[Any] | None = None

    def get(self, param: Any) -> list[torch.Tensor] | None:
        """Return the values of ``param``, flat and in parts, if they are here."""
        copy = self._copies.get(param)
        return copy.values if copy is not None and copy.writes == param._zerosync_record.writes else None

    def keeps(self, param: Any) -> bool:
        """Return whether ``param`` is gathered once in a window, and then copied from here."""
        return param in (self._copies if self.chosen is None else self.chosen)

    def was_there(self, param: Any) -> bool:
        """Return whether the values that ``param`` has now were here when the window began."""
        return param in self._at_begin and self._at_begin[param] == param._zerosync_record.writes

    def keep(self, params: Iterable[Any]) -> None:
        """``params`` have just been gathered, on the current stream: copy those that are to be kept."""
        for param in params:
            is_wanted = not zero3.is_persistent(param) if self.chosen is None else param in self.chosen
            if is_wanted and self.get(param) is None:
                copy = self._copies.get(param) or self._allocate(param)
                if copy is not None:
                    _store(param, copy.values)
                    copy.writes = param._zerosync_record.writes

    def renew(self, param: Any) -> None:
        """Copy the present values of a gathered ``param`` that has a copy, on the current stream."""
        _store(param, self._copies[param].values)

    def count_loaded(self, params: Iterable[Any]) -> None:
        """Count ``params`` as copied back."""
        self.loaded_bytes += sum(map(zero3.full_bytes, params))

    def choose(self, params: set[Any], leaving: Iterable[Any]) -> None:
        """Keep ``params`` from here on, and beside them what fits of ``leaving``, until the device holds it."""
        self.chosen = params
        room = None if self.limit is None else self.limit - sum(map(self._bytes_of, params))
        stays = params.union(fitting(leaving, room, self._bytes_of))
        self.free(param for param in list(self._copies) if param not in stays)
        self._streams.give_host_memory_back()

    def fitting(self, params: Iterable[Any]) -> list[Any]:
        """Return those of ``params``, the first first, whose copies fit."""
        return fitting(params, self.limit, self._bytes_of)

    def free(self, params: Iterable[Any]) -> None:
        """Give the memory of the copies of ``params`` back."""
        for param in params:
            if (copy := self._copies.pop(param, None)) is not None:
                self._bytes -= copy.nbytes

    def reset_counts(self) -> None:
        """A step has been taken: count from zero."""
        self.peak_bytes, self.loaded_bytes = self._bytes, 0
        self._at_begin = {param: copy.writes for param, copy in self._copies.items() if self.get(param) is not None}

    def _blocks_of(self, param: Any) -> list[int]:
        nbytes = zero3.full_bytes(param)
        return pinned_blocks(nbytes) if self._streams.concurrent else [nbytes]

    def _bytes_of(self, param: Any) -> int:
        return sum(self._blocks_of(param))

    def _allocate(self, param: Any) -> _Copy | None:
        blocks = self._blocks_of(param)
        if self.limit is not None and self._bytes + sum(blocks) > self.limit:
            return None
        values, left = [], zero3.full_numel(param)
        with torch.inference_mode(False):
            for nbytes in blocks:
                numel = min(left, nbytes // param.dtype.itemsize)
                values.append(self._streams.host_memory(nbytes // param.dtype.itemsize, param.dtype)[:numel])
                left -= numel
        self._bytes += sum(blocks)
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        self._copies[param] = copy = _Copy(values, sum(blocks))
        return copy


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


def fitting(params: Iterable[Any], room: int | None, bytes_of: Callable[[Any], int] = zero3.full_bytes) -> list[Any]:
    """Return those of ``params``, the first first, that fit into ``room`` bytes; ``None``: all."""
    chosen = []
    for param in params:
        nbytes = bytes_of(param)
        if room is None or nbytes <= room:
            chosen.append(param)
            room = None if room is None else room - nbytes
    return chosen
