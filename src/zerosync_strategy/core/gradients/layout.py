"""Layouts: where ZeRO keeps the gradients that one process group shards, and which of them are in which rank's shard.

A layout is one of three: the flat buffer of ZeRO-1 and 2 in stripes (``stage12.py``), ZeRO-3's single parameters
(``stage3.py``), and parameters with owners (``owned.py``). In the first two, the shards of all ranks have the same
number of elements, padding included; they form one or more matrices with a row per rank. A layout is divided into
placements, one per bucket, which prepare and launch its reduction (``placement.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zerosync_strategy.core.comm.collectives import InFlight, all_gather, all_reduce, is_native
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
    def divide(self, buckets: Sequence[Sequence[nn.Parameter]]) -> Sequence[Any]:
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
