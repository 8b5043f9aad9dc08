"""ZeRO-3: copies of parameters that stay where they need not be gathered from, or not from far away: on host and node.

A copy holds until the parameter's shards are written, by whomever: each write is counted (``Record.writes``), alike on
all ranks. So what has a copy is known on all of them without a message. An optimizer step ends what it changes; a copy
of a parameter that no optimizer trains serves for the whole run (R4).

- In host memory, in full: the first gather of a window leaves a copy there, and later ones copy it back, over the bus
  and not over the network. The idea is that of FCDP (arXiv 2602.06499). It is made and read on the stream on which its
  parameter is gathered: neither waits for the other.
- In *node shards* (``comm/nodes.py``): of the shards of all ranks, a rank keeps those of the ranks that have its place
  on their node. So later gathers of the window send nothing between nodes. DeepSpeed's hpZ has such shards, too; it
  refills them, by a gather from all ranks, in every step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.engine import gathering, zero3
from zerosync_strategy.core.engine.param_functions import for_training

_PAGE = 4096  # bytes that a block of pinned memory has at least
Values = TypeVar("Values")


@dataclass
class _Copy(Generic[Values]):
    """The memory of one parameter's copy, of ``nbytes`` bytes.

    ``writes``: to the parameter's shards before it was made; ``None``: it has no values.
    """

    values: Values
    nbytes: int
    writes: int | None = None


class Copies(ABC, Generic[Values]):
    """Copies of one kind of the parameters of one engine.

    Attributes:
        limit: bytes of the memory of all copies; ``None``: no limit.
        chosen: the parameters to keep; ``None`` while it is unknown which are gathered more than once: whatever comes
            first and fits.
        now, peak_bytes: bytes of copies, and the most at once since the last :meth:`reset_counts`.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._copies: dict[Any, _Copy[Values]] = {}
        self.now = self.peak_bytes = 0
        self._at_begin: dict[Any, int | None] = {}  # what had a copy when the window began
        self.chosen: set[Any] | None = None

    def may_have(self, param: Any) -> bool:
        return True

    @abstractmethod
    def bytes_of(self, param: Any) -> int:
        """Return the bytes of the memory of a copy of ``param``."""

    @abstractmethod
    def _allocate(self, param: Any) -> Values:
        """Return memory for a copy of ``param``, of :meth:`bytes_of` bytes."""

    @abstractmethod
    def renew(self, param: Any) -> None:
        """Copy the present values of a gathered ``param`` that has a copy, on the current stream."""

    def get(self, param: Any) -> Values | None:
        copy = self._copies.get(param)
        return copy.values if copy is not None and copy.writes == param._zerosync_record.writes else None

    def all_values(self) -> list[Values]:
        return [copy.values for copy in self._copies.values()]

    def keeps(self, param: Any) -> bool:
        """Return whether ``param`` is copied once in a window, and then taken from here."""
        return param in (self._copies if self.chosen is None else self.chosen)

    def was_there(self, param: Any) -> bool:
        """Return whether the values that ``param`` has now were here when the window began."""
        return param in self._at_begin and self._at_begin[param] == param._zerosync_record.writes

    def to_fill(self, param: Any) -> Values | None:
        """Return the memory for the values of ``param``, just gathered, which are here from now on.

        ``None``: none is needed, wanted, or left.
        """
        is_wanted = not zero3.is_persistent(param) if self.chosen is None else param in self.chosen
        if not is_wanted or self.get(param) is not None:
            return None
        copy = self._copies.get(param)
        if copy is None:
            nbytes = self.bytes_of(param)
            if self.limit is not None and self.now + nbytes > self.limit:
                return None
            copy = self._copies[param] = _Copy(self._allocate(param), nbytes)
            self.now += nbytes
            self.peak_bytes = max(self.peak_bytes, self.now)
        copy.writes = param._zerosync_record.writes
        return copy.values

    def choose(self, params: set[Any], leaving: Iterable[Any]) -> None:
        """Keep ``params`` from here on, and beside them what fits of ``leaving``, until the device holds it."""
        self.chosen = params
        room = None if self.limit is None else self.limit - sum(map(self.bytes_of, params))
        stays = params.union(fitting(leaving, room, self.bytes_of))
        self.free(param for param in list(self._copies) if param not in stays)
        self.peak_bytes = self.now  # of the coming window

    def free(self, params: Iterable[Any]) -> None:
        for param in params:
            if (copy := self._copies.pop(param, None)) is not None:
                self.now -= copy.nbytes

    def reset_counts(self) -> None:
        self.peak_bytes = self.now
        self._at_begin = {param: copy.writes for param, copy in self._copies.items() if self.get(param) is not None}


def fitting(params: Iterable[Any], room: int | None, bytes_of: Callable[[Any], int] = zero3.full_bytes) -> list[Any]:
    """Return those of ``params``, the first first, that fit into ``room`` bytes; ``None``: all."""
    chosen = []
    for param in params:
        nbytes = bytes_of(param)
        if room is None or nbytes <= room:
            chosen.append(param)
            room = None if room is None else room - nbytes
    return chosen


# ---- in host memory ----------------------------------------------------------------------------------------------


class HostCache(Copies[list[torch.Tensor]]):
    """Full parameters of one ZeRO-3 engine in host memory, pinned on devices that are not the CPU; flat.

    Torch allocates pinned memory in blocks of a power of two: 33 MiB in one block take 64. So a copy lies in several
    parts, which are a sixteenth larger at most (:func:`pinned_blocks`).

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


# ---- in shards of the node ---------------------------------------------------------------------------------------


class NodeShards(Copies[torch.Tensor]):
    """Node shards of the parameters of one engine: a matrix for each, with one row per node, in the gather's dtype.

    Those of process groups with one level have none. ``shared``: the limit is that of what is held on the device, too.
    """

    def __init__(self, limit: int | None, shared: bool) -> None:
        super().__init__(limit)
        self.shared = shared

    def may_have(self, param: Any) -> bool:
        return _nodes(param) is not None

    def bytes_of(self, param: Any) -> int:
        nodes = _nodes(param)
        return 0 if nodes is None else nodes.count * zero3.shard_numel(param) * zero3.gather_dtype(param).itemsize

    def _allocate(self, param: Any) -> torch.Tensor:
        nodes = _nodes(param)
        shape, dtype = (nodes.count, zero3.shard_numel(param)), zero3.gather_dtype(param)
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype, device=param.device)

    def keep(self, arrival: gathering.Arrival) -> None:
        """Wait for all ranks' shards of parameters, a row each, on the current stream, and keep those of the node."""
        arrival.wait()
        for param, rows in zip(arrival.params, arrival.received.split(arrival.columns, -1), strict=True):
            nodes = _nodes(param)
            if nodes is not None and (values := self.to_fill(param)) is not None:
                values.copy_(nodes.rows_of_place(rows))

    def renew(self, param: Any) -> None:
        nodes = _nodes(param)
        values = self._copies[param].values
        padded = values.new_zeros(nodes.size * values.numel())
        padded[: param.numel()].copy_(param.data.reshape(-1))
        values.copy_(nodes.rows_of_place(padded.view(-1, values.shape[1])))


def _nodes(param: Any) -> Any:
    return param._zerosync_record.group.nodes


@for_training
def gather_node_shards(nodes: Any, shards: Mapping[Any, torch.Tensor], tag: int, label: object) -> gathering.Arrival:
    """As :class:`gathering.Message`, from the ranks of this node alone.

    ``shards``: by parameter, this rank's node shard, one row per node; all of one dtype.
    """
    columns = [shard.shape[1] for shard in shards.values()]
    first = next(iter(shards.values()))
    rows = nodes.empty_rows(sum(columns), first.dtype, first.device)
    torch._foreach_copy_(list(nodes.own_rows(rows).split(columns, 1)), list(shards.values()))
    return gathering.Arrival(list(shards), columns, rows, nodes.gather_within(rows, tag, label).wait)
