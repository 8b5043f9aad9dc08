"""Where ZeRO keeps which part of each gradient: the layout that a reduction sends by, read off the live optimizer.

Over a process group of W ranks, each rank's shard has the same number of elements, padding included. So all shards, one
rank's in each row, are a matrix. Stages 1 and 2 lay the gradients one after the other into a flat buffer, which is cut
into stripes of such rows (:class:`FlatLayout`). ZeRO-3 gives each gradient columns of its own and lays it into them row
by row (:class:`CutLayout`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.stripes import OwnSlice, Stripes
from zerosync_strategy.core.engine import zero3


class ShardLayout(ABC):
    """The gradients that one process group shards.

    Attributes:
        process_group: the group; ``rank`` is this process's rank in it, ``world_size`` its size.
        params: the parameters, each once.
        shard_numel: elements of one rank's shard.
        divisor: what a sum over the group is divided by to average it.
        dtype: of the reduction.
        group_index: DeepSpeed's index of the parameter group, on stages 1 and 2.
    """

    def __init__(
        self, process_group: Any, params: Sequence[Any], shard_numel: int, divisor: float, dtype: torch.dtype
    ) -> None:
        self.process_group = process_group
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.params = list(params)
        self.shard_numel = shard_numel
        self.divisor = divisor
        self.dtype = dtype
        self.group_index = 0

    @abstractmethod
    def matrices(self, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the matrices of shards in ``memory``, which has all shards: rows by rank, and where in the shard."""

    @abstractmethod
    def gradient_in(self, memory: torch.Tensor, param: Any) -> torch.Tensor:
        """Return the gradient of ``param``, flat, in ``memory``, which has all shards. May be a copy."""

    @abstractmethod
    def own_slices(self, param: Any) -> list[OwnSlice]:
        """Return which parts of the gradient of ``param`` this rank keeps."""


class FlatLayout(ShardLayout):
    """Parameter ``params[i]`` begins at ``offsets[i]`` of the flat buffer. The parameters are in that order.

    Attributes:
        stripes: how the buffer is divided among the ranks; by :meth:`divide`.
    """

    stripes: Stripes

    def __init__(
        self, process_group: Any, params: Sequence[Any], offsets: Sequence[int], shard_numel: int, divisor: float,
        dtype: torch.dtype, group_index: int,
    ) -> None:  # fmt: skip
        self.offsets = dict(sorted(zip(params, offsets, strict=True), key=lambda pair: pair[1]))
        super().__init__(process_group, list(self.offsets), shard_numel, divisor, dtype)
        self.group_index = group_index
        self.numel = self.world_size * shard_numel

    def divide(self, firsts: Sequence[Any]) -> None:
        """Let a stripe begin at each of these parameters, in their order."""
        starts = [0, *(self.offsets[param] for param in firsts[1:])]
        self.stripes = Stripes(starts, self.numel, self.rank, self.world_size)

    def matrices(self, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
        for stripe in self.stripes:
            yield stripe.rows(memory), stripe.offset

    def gradient_in(self, memory: torch.Tensor, param: Any) -> torch.Tensor:
        return memory.narrow(0, self.offsets[param], param.numel())

    def own_slices(self, param: Any, stock: bool = False) -> list[OwnSlice]:
        """Return which parts of ``param`` this rank keeps by stripes, or in DeepSpeed's own layout with ``stock``."""
        begin = self.offsets[param]
        return self.stripes.own_of(begin, begin + param.numel(), stock)


class CutLayout(ShardLayout):
    """Parameter ``params[i]`` has ``shard_numels[i]`` columns, which begin where those of the one before end."""

    def __init__(
        self, process_group: Any, params: Sequence[Any], shard_numels: Sequence[int], divisor: float, dtype: torch.dtype
    ) -> None:
        super().__init__(process_group, params, sum(shard_numels), divisor, dtype)
        self.shard_numels = dict(zip(params, shard_numels, strict=True))
        self.columns: dict[Any, int] = {}
        column = 0
        for param, shard_numel in self.shard_numels.items():
            self.columns[param] = column
            column += shard_numel
        self.column_list = list(self.columns.values())

    def matrices(self, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
        yield memory.view(self.world_size, self.shard_numel), 0

    def gradient_in(self, memory: torch.Tensor, param: Any) -> torch.Tensor:
        rows = memory.view(self.world_size, self.shard_numel)
        columns = rows.narrow(1, self.columns[param], self.shard_numels[param])
        return columns.reshape(-1)[: zero3.full_numel(param)]

    def own_slices(self, param: Any) -> list[OwnSlice]:
        shard_numel, numel = self.shard_numels[param], zero3.full_numel(param)
        first, last = (min((self.rank + k) * shard_numel, numel) for k in (0, 1))
        return [OwnSlice(first, last, self.columns[param])]
