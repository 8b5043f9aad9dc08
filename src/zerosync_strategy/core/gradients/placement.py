"""Placements: which elements of the gradients are in which rank's shard, and how a reduction brings them there.

The gradients that one process group shards are a *layout*. There are three: ZeRO-1's and 2's flat buffer in stripes
(``striped.py``), ZeRO-3's parameters each by itself (``per_param.py``), and parameters that have owners (``owned.py``).
In the first two, all ranks' shards have the same number of elements, padding included: one rank's in each row, they are
a matrix, or several. A layout is divided into the *placements* of its buckets, which are asked what a reduction takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import InFlight, Summing, all_gather, is_native, reduce_scatter
from zerosync_strategy.core.comm.nodes import Nodes
from zerosync_strategy.core.comm.stripes import ShardSlice
from zerosync_strategy.core.engine import zero3

Read = Callable[[torch.Tensor, int], None]
"""Copies this rank's shard from an offset on into a tensor."""


class ShardLayout(ABC):
    """Where ZeRO keeps the gradients that one process group shards, read off the live optimizer.

    Attributes:
        params: each once.
        divisor: what a sum over the group is divided by to average it.
        dtype: of the reduction.
        nodes: of the process group; ``None`` where two levels would be one.
        group_index: DeepSpeed's index of the parameter group, on stages 1 and 2.
        is_native: the backend has a reduce-scatter of its own.
        shard_numel: elements of this rank's shard.
    """

    shard_numel: int

    def __init__(
        self, process_group: Any, params: Sequence[Any], divisor: float, dtype: torch.dtype, nodes: Nodes | None,
        group_index: int = 0,
    ) -> None:  # fmt: skip
        self.process_group, self.nodes, self.group_index = process_group, nodes, group_index
        self.is_native = bool(params) and is_native(process_group, params[0].device)
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.params, self.divisor, self.dtype = list(params), divisor, dtype

    @abstractmethod
    def divide(self, buckets: Sequence[Sequence[Any]]) -> Sequence[Placement]:
        """Return the placement of each bucket's parameters. Called once; those of a flat buffer are in its order."""

    @abstractmethod
    def shard_slices(self, param: Any, stock: bool = False) -> list[ShardSlice]:
        """Return which parts of ``param`` are in this rank's shard, or in that of DeepSpeed's layout with ``stock``."""

    @abstractmethod
    def gather_shards(self, dtype: torch.dtype, device: torch.device, read: Read) -> torch.Tensor:
        """Return the memory of all shards, in ``dtype``, for :meth:`gradient_in`. Collective."""

    @abstractmethod
    def gradient_in(self, memory: torch.Tensor, param: Any) -> torch.Tensor:
        """Return the gradient of ``param``, flat, in ``memory``, which has all shards. May be a copy."""

    def in_node_shard(self, nbytes: int) -> int:
        """Return how many of so many bytes of gradients are in a node shard, the largest; of several nodes."""
        assert self.nodes is not None
        return nbytes // self.nodes.size

    def read(self, shard: torch.Tensor, param: Any, stock: bool = False) -> torch.Tensor:
        """Return ``param``'s elements of all ranks' shards, in its shape and in fp32. Collective."""
        from deepspeed import comm

        full = torch.zeros(zero3.full_numel(param), dtype=torch.float32, device=param.device)
        for own in self.shard_slices(param, stock):
            full[own.start : own.stop].copy_(own.of(shard))
        comm.all_reduce(full, group=self.process_group)
        return full.view(zero3.full_shape(param))

    def write(self, value: torch.Tensor, shard: torch.Tensor, param: Any, stock: bool = False) -> None:
        """Copy this rank's part of ``value``, of ``param``, into its shard."""
        flat = value.detach().reshape(-1)
        for own in self.shard_slices(param, stock):
            own.of(shard).copy_(flat[own.start : own.stop])

    def all_gather(self, rows: torch.Tensor, tag: int = 0, label: str = "") -> InFlight:
        """As :func:`collectives.all_gather`, in two levels where that sends less."""
        if self.nodes is not None and not self.is_native:
            return self.nodes.all_gather(rows, tag, label)
        return all_gather(rows, self.process_group, tag, label)


class Part(NamedTuple):
    """Where the result of a reduction belongs: elements of this rank's shard.

    ``begin`` is where it begins in the bucket, and tells parts apart, of which this rank may have no element.
    """

    offset: int
    numel: int
    begin: int


class ReduceScatterInput(NamedTuple):
    """What is summed over the ranks, and where in this rank's shard its own sum belongs.

    ``rows`` is a matrix with a row for each rank; where parameters have owners, rows of any lengths, by rank (in two
    levels, by place).
    """

    rows: Any
    part: Part


class Placement(ABC):
    """Where the gradients of one bucket belong.

    Attributes:
        offset, width: what it has of this rank's shard.
        order: the parameters, as they follow each other where they are packed.
        is_empty: no rank has elements of it, so that it is neither reduced nor gathered.
        head: elements at the beginning of what is packed that the bucket below reduces, not this one.
    """

    is_empty = False
    head = 0

    def __init__(self, offset: int, width: int, order: Sequence[Any]) -> None:
        self.offset, self.width, self.order = offset, width, order

    @abstractmethod
    def pack(
        self, gradients: Sequence[torch.Tensor | None], dtype: torch.dtype, above: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the ``gradients``, in :attr:`order`, zeros where there is none: flat, for :meth:`inputs`.

        They have ``dtype``. ``above``: the head of the bucket above, where there is one. The result may be the memory
        of the only gradient.
        """

    @abstractmethod
    def inputs(self, memory: torch.Tensor, most: int, nodes: Nodes | None) -> Iterator[ReduceScatterInput]:
        """Yield what ``memory``, flat and packed, has for the ranks: at most ``most`` elements for each, as a mean.

        It is reduced within and between ``nodes``, or over all ranks at once.
        """

    @abstractmethod
    def reduce(self, rows: Any, how: Summing, out: torch.Tensor | None) -> InFlight:
        """Launch the reduction of what :meth:`inputs` has yielded; ``out``: where the result may go."""

    @abstractmethod
    def reduce_within(self, nodes: Nodes, rows: Any, how: Summing) -> InFlight:
        """Sum it over the ranks of this node; returns the node shard of it."""

    @abstractmethod
    def reduce_between(
        self, nodes: Nodes, part: Part, sums: torch.Tensor, how: Summing, out: torch.Tensor | None
    ) -> InFlight:
        """Sum node shards over the nodes; returns this rank's elements."""


class RowPlacement(Placement):
    """Of a bucket whose memory is a matrix with a row for each rank of ``layout``."""

    def __init__(self, layout: ShardLayout, offset: int, width: int, order: Sequence[Any]) -> None:
        super().__init__(offset, width, order)
        self._layout = layout

    def _is_packed(self, pieces: Sequence[torch.Tensor]) -> bool:
        """Return whether ``pieces``, the flat gradients, are one that is the matrix as it lies."""
        return len(pieces) == 1 and len(pieces[0]) == self._layout.world_size * self.width

    def inputs(self, memory: torch.Tensor, most: int, nodes: Nodes | None) -> Iterator[ReduceScatterInput]:
        rows = memory.view(self._layout.world_size, self.width)
        for first in range(0, self.width, most):
            columns = rows[:, first : first + most]
            part = Part(self.offset + first, columns.shape[1], first)
            yield ReduceScatterInput(columns.to(self._layout.dtype), part)

    def reduce(self, rows: torch.Tensor, how: Summing, out: torch.Tensor | None) -> InFlight:
        return reduce_scatter(rows, self._layout.process_group, how, out)

    def reduce_within(self, nodes: Nodes, rows: torch.Tensor, how: Summing) -> InFlight:
        return nodes.reduce_within(rows, how)

    def reduce_between(
        self, nodes: Nodes, part: Part, sums: torch.Tensor, how: Summing, out: torch.Tensor | None
    ) -> InFlight:
        return nodes.reduce_between(sums, self._layout.dtype, how, out)


def with_zeros(
    params: Sequence[Any], gradients: Sequence[torch.Tensor | None], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return the ``gradients`` of ``params``, flat and in ``dtype``, with zeros where there is none."""
    pieces = [
        torch.zeros(zero3.full_numel(param), dtype=dtype, device=param.device)
        if gradient is None
        else gradient.reshape(-1)
        for param, gradient in zip(params, gradients, strict=True)
    ]
    return pieces if {piece.dtype for piece in pieces} <= {dtype} else [piece.to(dtype) for piece in pieces]
