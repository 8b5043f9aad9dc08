"""Layouts: where ZeRO keeps the gradients that one process group shards, and which of them are in which rank's shard.

A layout is one of three: the flat buffer of ZeRO-1 and 2 in stripes (``stage12.py``), ZeRO-3's single parameters
(``stage3.py``), and parameters with owners (``owned.py``). In the first two, the shards of all ranks have the same
number of elements, padding included; they form one or more matrices with a row per rank. A layout is divided into
placements, one per bucket: a placement says where the gradients of the bucket belong, and launches its reduction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zerosync_strategy.core.comm.collectives import InFlight, Summing, all_gather, all_reduce, is_native, reduce_scatter
from zerosync_strategy.core.comm.journal import SentCounter
from zerosync_strategy.core.comm.nodes import Nodes
from zerosync_strategy.core.engine import zero3

ALIGNMENT = 8
"""Rows of what NCCL sends begin at multiples of this many elements: it copies 16 bytes at a time."""


class ShardSlice(NamedTuple):
    """Elements ``start`` to ``stop`` of a flat tensor, at ``offset`` in this rank's shard; perhaps none."""

    start: int
    stop: int
    offset: int

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        return shard[self.offset : self.offset + self.stop - self.start]


ReadShard = Callable[[torch.Tensor, int], None]
"""Fills a tensor from this rank's shard, from an offset on."""


class ShardLayout(ABC):
    """Where ZeRO keeps the gradients that one process group shards, as found in the live optimizer.

    Attributes:
        params: each once.
        divisor: a sum over the group divided by it is the average.
        dtype: of the reduction.
        nodes: of the process group; ``None`` if two levels are of no use.
        counter: of what the engine sends.
        group_index: DeepSpeed's index of the parameter group, on stages 1 and 2.
        is_native: the backend has a reduce-scatter of its own.
        in_two_levels: what is reduced over all ranks is reduced within nodes first. NCCL's own reduce-scatter crosses
            between two nodes once by itself; an all-to-all, for ordered sums, does not.
        shard_numel: elements of this rank's shard.
    """

    shard_numel: int

    def __init__(
        self, process_group: dist.ProcessGroup, params: Sequence[nn.Parameter], divisor: float, dtype: torch.dtype,
        nodes: Nodes | None, counter: SentCounter, group_index: int = 0,
    ) -> None:  # fmt: skip
        self.process_group, self.nodes, self.counter, self.group_index = process_group, nodes, counter, group_index
        self.is_native = bool(params) and is_native(process_group, params[0].device)
        self.in_two_levels = not self.is_native
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.params, self.divisor, self.dtype = list(params), divisor, dtype

    @abstractmethod
    def divide(self, buckets: Sequence[Sequence[nn.Parameter]]) -> Sequence[Placement]:
        """Return the placement of each bucket's parameters. Called once; in the order of the flat buffer, if any."""

    @abstractmethod
    def shard_slices(self, param: nn.Parameter, stock: bool = False) -> list[ShardSlice]:
        """Return the parts of ``param`` in this rank's shard; with ``stock``, of the shard in DeepSpeed's layout."""

    @abstractmethod
    def gather_shards(self, dtype: torch.dtype, device: torch.device, read: ReadShard) -> torch.Tensor:
        """Gather all shards into one tensor in ``dtype``, for :meth:`gradient_in`. Collective."""

    @abstractmethod
    def gradient_in(self, memory: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
        """Return the flat gradient of ``param`` from ``memory``, which holds all shards. May be a copy."""

    def in_node_shard(self, nbytes: int) -> int:
        """Return how many of ``nbytes`` of gradients the largest node shard holds. Needs several nodes."""
        assert self.nodes is not None
        return nbytes // self.nodes.size

    def read(self, shard: torch.Tensor, param: nn.Parameter, stock: bool = False) -> torch.Tensor:
        """Return the full ``param``-shaped tensor of all ranks' shards, in fp32. Collective."""
        full = torch.zeros(zero3.full_numel(param), dtype=torch.float32, device=param.device)
        for own in self.shard_slices(param, stock):
            full[own.start : own.stop].copy_(own.of(shard))
        all_reduce(full, self.process_group, self.counter)
        return full.view(zero3.full_shape(param))

    def write(self, value: torch.Tensor, shard: torch.Tensor, param: nn.Parameter, stock: bool = False) -> None:
        """Copy this rank's part of ``value``, which has the elements of ``param``, into ``shard``."""
        flat = value.detach().reshape(-1)
        for own in self.shard_slices(param, stock):
            own.of(shard).copy_(flat[own.start : own.stop])

    def all_gather(self, rows: torch.Tensor, tag: int = 0, label: str = "") -> InFlight:
        """Launch an all-gather as :func:`collectives.all_gather` does, in two levels where that sends less."""
        if self.nodes is not None and not self.is_native:
            return self.nodes.all_gather(rows, self.counter, tag, label)
        return all_gather(rows, self.process_group, self.counter, tag, label)


# ---- placements --------------------------------------------------------------------------------------------------


class ShardPart(NamedTuple):
    """The elements of this rank's shard to which the result of a reduction belongs.

    ``begin`` is the offset in the bucket. It distinguishes parts, also if this rank has no element of them.
    """

    offset: int
    numel: int
    begin: int


class ReduceScatterInput(NamedTuple):
    """The input of one reduction, and the part of this rank's shard to which this rank's result belongs.

    ``rows`` is a matrix with a row per rank, which may have zeros after the part. For parameters with owners, it is a
    mapping of rows of any lengths by rank (in two levels, by place in the node).
    """

    rows: Any
    part: ShardPart


class Scaling(NamedTuple):
    """The factor for what is sent, chunk by chunk. ``is_packed``: in memory that is not a gradient's own."""

    factor: float
    is_packed: bool

    def of(self, chunk: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return ``chunk`` times the factor, in ``dtype``; multiplied in the wider one."""
        is_packed = self.is_packed
        if dtype.itemsize > chunk.dtype.itemsize:
            chunk, is_packed = chunk.to(dtype), True
        if self.factor != 1.0:  # a program may share the memory of a gradient
            chunk = chunk.mul_(self.factor) if is_packed else chunk.mul(self.factor)
        return chunk.to(dtype)


class Placement(ABC):
    """Where the gradients of one bucket belong.

    Attributes:
        offset, width: the elements of this rank's shard that belong to the bucket.
        order: the parameters in the order in which they are packed.
        is_empty: no rank has an element of it, so it is neither reduced nor gathered.
        head: number of packed elements, at the beginning, that the bucket below reduces instead.
    """

    is_empty = False
    head = 0

    def __init__(self, offset: int, width: int, order: Sequence[nn.Parameter]) -> None:
        self.offset, self.width, self.order = offset, width, order

    @abstractmethod
    def pack(
        self, gradients: Sequence[torch.Tensor | None], dtype: torch.dtype, above: torch.Tensor | None
    ) -> torch.Tensor:
        """Pack the ``gradients``, given in :attr:`order`, into a flat tensor for :meth:`inputs`; zeros for ``None``.

        ``dtype`` is that of the gradients, ``above`` the head of the bucket above, if any. The result may share the
        memory of a single gradient.
        """

    @abstractmethod
    def inputs(
        self, memory: torch.Tensor, most: int, nodes: Nodes | None, scaling: Scaling
    ) -> Iterator[ReduceScatterInput]:
        """Cut ``memory``, flat and packed, into scaled inputs of at most ``most`` elements per rank on average.

        They are reduced within and between ``nodes``; if ``None``, over all ranks at once.
        """

    @abstractmethod
    def reduce(self, rows: Any, how: Summing, out: torch.Tensor | None) -> InFlight:
        """Launch the reduction of ``rows`` from :meth:`inputs` over all ranks; the result may be written to ``out``."""

    @abstractmethod
    def reduce_within(self, nodes: Nodes, rows: Any, how: Summing) -> InFlight:
        """Launch the sum of ``rows`` over the ranks of this node; the result is this rank's node shard of it."""

    @abstractmethod
    def reduce_between(
        self, nodes: Nodes, part: ShardPart, sums: torch.Tensor, how: Summing, out: torch.Tensor | None
    ) -> InFlight:
        """Launch the sum of node shards over the nodes; the result is this rank's elements."""


class RowPlacement(Placement):
    """The placement of a bucket that is packed as a matrix with a row per rank of ``layout``."""

    def __init__(self, layout: ShardLayout, offset: int, width: int, order: Sequence[nn.Parameter]) -> None:
        super().__init__(offset, width, order)
        self._layout = layout

    def inputs(
        self, memory: torch.Tensor, most: int, nodes: Nodes | None, scaling: Scaling
    ) -> Iterator[ReduceScatterInput]:
        for first in range(0, self.width, most):
            count = min(most, self.width - first)
            rows = scaling.of(self._columns(memory, first, count), self._layout.dtype)
            yield ReduceScatterInput(rows, ShardPart(self.offset + first, count, first))

    def _columns(self, memory: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """Return ``count`` columns of the matrix from ``first`` on, perhaps with zeros after them."""
        return memory.view(self._layout.world_size, self.width)[:, first : first + count]

    def reduce(self, rows: torch.Tensor, how: Summing, out: torch.Tensor | None) -> InFlight:
        return reduce_scatter(rows, self._layout.process_group, how, out)

    def reduce_within(self, nodes: Nodes, rows: torch.Tensor, how: Summing) -> InFlight:
        return nodes.reduce_within(rows, how)

    def reduce_between(
        self, nodes: Nodes, part: ShardPart, sums: torch.Tensor, how: Summing, out: torch.Tensor | None
    ) -> InFlight:
        return nodes.reduce_between(sums, self._layout.dtype, how, out)


def with_zeros(
    params: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return the ``gradients`` of ``params``, flat and in ``dtype``, with zeros for ``None``."""
    try:
        pieces = [
            torch.zeros(zero3.full_numel(param), dtype=dtype, device=param.device)
            if gradient is None
            else gradient.reshape(-1)
            for param, gradient in zip(params, gradients, strict=True)
        ]
    except RuntimeError:
        _refuse_sparse(gradients)
        raise
    return pieces if {piece.dtype for piece in pieces} <= {dtype} else [piece.to(dtype) for piece in pieces]


def _refuse_sparse(gradients: Sequence[torch.Tensor | None]) -> None:
    """Raise ``ValueError`` if one of the ``gradients`` is sparse, as of a function that was given ``sparse=True``."""
    for gradient in gradients:
        if gradient is not None and gradient.layout is not torch.strided:
            raise ValueError(
                f"ZeroSync found a sparse gradient, of a parameter of shape {tuple(gradient.shape)}, and ZeRO's shards"
                " are dense. Leave 'sparse=True' or 'sparse_grad=True' of the function that made it out."
            )
