"""ZeRO-3: copies of parameters in memory that is nearer than the shards of all ranks: on the host and on the node.

A copy is valid until the parameter's shards are written. Each write is counted (``Record.writes``), alike on all ranks,
so all ranks know without a message which parameters have a valid copy. An optimizer step invalidates the copies of what
it changes. A copy of a parameter that no optimizer trains is valid for the whole run (R4).

- In host memory, full parameters: the first gather of a window stores a copy, and later gathers copy it back over the
  bus instead of the network. The idea is that of FCDP (arXiv 2602.06499). A copy is written and read on the stream on
  which its parameter is gathered, so neither waits for the other.
- In *node shards* (``comm/nodes.py``): a rank keeps the shards of the ranks that have its local rank on each node, so
  later gathers of the window send nothing between nodes. DeepSpeed's hpZ has these shards, too, but refills them in
  every step by a gather from all ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from zerosync_strategy.core.comm.journal import SentCounter
from zerosync_strategy.core.comm.nodes import Nodes
from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.engine import gathering, zero3
from zerosync_strategy.core.engine.torch_internals import for_training
from zerosync_strategy.core.engine.types import Zero3Parameter

_PAGE = 4096  # least bytes of a block of pinned memory
Values = TypeVar("Values")


@dataclass
class _Copy(Generic[Values]):
    """The memory of one parameter's copy, of ``nbytes`` bytes.

    ``writes``: ``Record.writes`` when it was made; ``None``: it has no values.
    """

    values: Values
    nbytes: int
    writes: int | None = None


class Copies(ABC, Generic[Values]):
    """Copies of one kind of the parameters of one engine.

    Attributes:
        limit: bytes of the memory of all copies; ``None``: no limit.
        chosen: the parameters to keep; ``None`` until it is known which are gathered more than once: then each that
            fits is kept, in the order of gathers.
        now, peak_bytes: bytes of copies, and the most at once since the last :meth:`reset_counts`.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._copies: dict[Zero3Parameter, _Copy[Values]] = {}
        self.now = self.peak_bytes = 0
        self._at_begin: dict[Zero3Parameter, int | None] = {}  # the copies that were valid when the window began
        self.chosen: set[Zero3Parameter] | None = None

    def may_have(self, param: Zero3Parameter) -> bool:
        return True

    @abstractmethod
    def bytes_of(self, param: Zero3Parameter) -> int:
        """Return the bytes of the memory of a copy of ``param``."""

    @abstractmethod
    def _allocate(self, param: Zero3Parameter) -> Values:
        """Return memory for a copy of ``param``, of :meth:`bytes_of` bytes."""

    @abstractmethod
    def renew(self, param: Zero3Parameter) -> None:
        """Copy the present values of a gathered ``param`` that has a copy, on the current stream."""

    def get(self, param: Zero3Parameter) -> Values | None:
        copy = self._copies.get(param)
        return copy.values if copy is not None and copy.writes == param._zerosync_record.writes else None

    def all_values(self) -> list[Values]:
        return [copy.values for copy in self._copies.values()]

    def keeps(self, param: Zero3Parameter) -> bool:
        """Return whether ``param`` is copied once per window and then read from the copy."""
        return param in (self._copies if self.chosen is None else self.chosen)

    def was_there(self, param: Zero3Parameter) -> bool:
        """Return whether the present values of ``param`` had a copy when the window began."""
        return param in self._at_begin and self._at_begin[param] == param._zerosync_record.writes

    def to_fill(self, param: Zero3Parameter) -> Values | None:
        """Return the memory to which to copy the values of ``param``, just gathered, and mark this copy as valid.

        Return ``None`` if a copy exists, is not wanted, or does not fit.
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

    def choose(self, params: set[Zero3Parameter], leaving: Iterable[Zero3Parameter]) -> None:
        """Keep copies of ``params``, and existing copies of ``leaving`` that also fit until the device holds them."""
        self.chosen = params
        room = None if self.limit is None else self.limit - sum(map(self.bytes_of, params))
        stays = params.union(fitting(leaving, room, self.bytes_of))
        self.free(param for param in list(self._copies) if param not in stays)
        self.peak_bytes = self.now  # of the coming window

    def free(self, params: Iterable[Zero3Parameter]) -> None:
        for param in params:
            if (copy := self._copies.pop(param, None)) is not None:
                self.now -= copy.nbytes

    def reset_counts(self) -> None:
        self.peak_bytes = self.now
        self._at_begin = {param: copy.writes for param, copy in self._copies.items() if self.get(param) is not None}


def fitting(
    params: Iterable[Zero3Parameter], room: int | None, bytes_of: Callable[[Zero3Parameter], int] = zero3.full_bytes
) -> list[Zero3Parameter]:
    """Return the parameters of ``params``, in order, that fit into ``room`` bytes; all if it is ``None``."""
    chosen = []
    for param in params:
        nbytes = bytes_of(param)
        if room is None or nbytes <= room:
            chosen.append(param)
            room = None if room is None else room - nbytes
    return chosen


# ---- in host memory ----------------------------------------------------------------------------------------------


class HostCache(Copies[list[torch.Tensor]]):
    """Full parameters of one ZeRO-3 engine in host memory: flat, and pinned unless the device is the CPU.

    Torch allocates pinned memory in blocks of a power of two: 33 MiB in one block take 64. So a copy lies in several
    parts, which together are at most a sixteenth larger than the values (:func:`pinned_blocks`).

    :attr:`loaded_bytes`: bytes copied back to the device since the last :meth:`reset_counts`.
    """

    def __init__(self, limit: int | None, streams: Streams) -> None:
        super().__init__(limit)
        self._streams = streams
        self.loaded_bytes = 0

    def bytes_of(self, param: Zero3Parameter) -> int:
        return sum(self._blocks_of(param))

    def _blocks_of(self, param: Zero3Parameter) -> list[int]:
        nbytes = zero3.full_bytes(param)
        return pinned_blocks(nbytes) if self._streams.concurrent else [nbytes]

    def _allocate(self, param: Zero3Parameter) -> list[torch.Tensor]:
        values, left = [], zero3.full_numel(param)
        with torch.inference_mode(False):
            for nbytes in self._blocks_of(param):
                numel = min(left, nbytes // param.dtype.itemsize)
                values.append(self._streams.host_memory(nbytes // param.dtype.itemsize, param.dtype)[:numel])
                left -= numel
        return values

    def keep(self, params: Iterable[Zero3Parameter]) -> None:
        """Copy those of ``params`` that are to be kept. All have just been gathered, on the current stream."""
        for param in params:
            if (values := self.to_fill(param)) is not None:
                _store(param, values)

    def renew(self, param: Zero3Parameter) -> None:
        _store(param, self._copies[param].values)

    def count_loaded(self, params: Iterable[Zero3Parameter]) -> None:
        self.loaded_bytes += sum(map(zero3.full_bytes, params))

    def choose(self, params: set[Zero3Parameter], leaving: Iterable[Zero3Parameter]) -> None:
        super().choose(params, leaving)
        self._streams.give_host_memory_back()

    def reset_counts(self) -> None:
        super().reset_counts()
        self.loaded_bytes = 0


def _store(param: Zero3Parameter, parts: list[torch.Tensor]) -> None:
    sizes = [part.numel() for part in parts]
    torch._foreach_copy_(parts, param.data.reshape(-1).split(sizes), non_blocking=True)


def pinned_blocks(nbytes: int) -> list[int]:
    """Return powers of two, largest first, that sum to ``nbytes`` or more: by at most a sixteenth, or a page."""
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
    """Node shards of the parameters of one engine: for each a matrix with one row per node, in the dtype of the gather.

    Parameters of process groups that are gathered in one level have none. ``shared``: the limit also covers what is
    held on the device.
    """

    def __init__(self, limit: int | None, shared: bool) -> None:
        super().__init__(limit)
        self.shared = shared

    def may_have(self, param: Zero3Parameter) -> bool:
        return _nodes(param) is not None

    def bytes_of(self, param: Zero3Parameter) -> int:
        nodes = _nodes(param)
        return 0 if nodes is None else nodes.count * zero3.shard_numel(param) * zero3.gather_dtype(param).itemsize

    def _allocate(self, param: Zero3Parameter) -> torch.Tensor:
        nodes = _nodes(param)
        shape, dtype = (nodes.count, zero3.shard_numel(param)), zero3.gather_dtype(param)
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype, device=param.device)

    def keep(self, arrival: gathering.Arrival) -> None:
        """Wait on the current stream for the shards of all ranks, one row each, and keep this rank's node shards."""
        arrival.wait()
        for param, rows in zip(arrival.params, arrival.shards(), strict=True):
            nodes = _nodes(param)
            if nodes is not None and (values := self.to_fill(param)) is not None:
                values.copy_(nodes.rows_of_local_rank(rows))

    def renew(self, param: Zero3Parameter) -> None:
        nodes = _nodes(param)
        values = self._copies[param].values
        padded = values.new_zeros(nodes.size * values.numel())
        padded[: param.numel()].copy_(param.data.reshape(-1))
        values.copy_(nodes.rows_of_local_rank(padded.view(-1, values.shape[1])))


def _nodes(param: Zero3Parameter) -> Nodes:
    return param._zerosync_record.group.nodes


@for_training
def gather_node_shards(
    nodes: Nodes, shards: Mapping[Zero3Parameter, torch.Tensor], counter: SentCounter, tag: int, label: object
) -> gathering.Arrival:
    """Gather parameters as :class:`gathering.ShardGather` does, but from the ranks of this node alone.

    ``shards``: by parameter, this rank's node shard, one row per node; all of one dtype.
    """
    columns = [shard.shape[1] for shard in shards.values()]
    first = next(iter(shards.values()))
    rows = nodes.empty_rows(sum(columns), first.dtype, first.device)
    torch._foreach_copy_(list(nodes.own_rows(rows).split(columns, 1)), list(shards.values()))
    return gathering.Arrival(list(shards), [], columns, rows, nodes.gather_within(rows, counter, tag, label).wait)
