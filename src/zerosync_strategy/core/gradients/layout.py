"""Where ZeRO keeps which part of each gradient: the layout that a reduction sends by, read off the live optimizer.

Over a process group of W ranks, each rank's shard has the same number of elements, padding included. So all shards, one
rank's in each row, are a matrix. Stages 1 and 2 lay the gradients one after the other into that matrix, row by row
(:class:`FlatLayout`). ZeRO-3 gives each gradient columns of its own and lays it into them row by row
(:class:`CutLayout`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerosync_strategy.core.engine import zero3


class OwnSlice(NamedTuple):
    """Elements ``start`` to ``stop`` of a flattened gradient, at ``offset`` in this rank's shard; may be none."""

    start: int
    stop: int
    offset: int


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
    def gradient_in(self, rows: torch.Tensor, param: Any) -> torch.Tensor:
        """Return the gradient of ``param``, flat, in ``rows``, the matrix of all shards. May be a copy."""

    @abstractmethod
    def own_slice(self, param: Any) -> OwnSlice:
        """Return which part of the gradient of ``param`` this rank keeps."""


class FlatLayout(ShardLayout):
    """Parameter ``params[i]`` begins at ``offsets[i]`` of the flattened matrix."""

    def __init__(
        self, process_group: Any, params: Sequence[Any], offsets: Sequence[int], shard_numel: int, divisor: float,
        dtype: torch.dtype, group_index: int,
    ) -> None:  # fmt: skip
        super().__init__(process_group, params, shard_numel, divisor, dtype)
        self.group_index = group_index
        self.offsets = dict(zip(params, offsets, strict=True))

    def gradient_in(self, rows: torch.Tensor, param: Any) -> torch.Tensor:
        return rows.view(-1).narrow(0, self.offsets[param], param.numel())

    def own_slice(self, param: Any) -> OwnSlice:
        offset, own = self.offsets[param], self.rank * self.shard_numel
        first = max(offset, own)
        last = max(first, min(offset + param.numel(), own + self.shard_numel))
        return OwnSlice(first - offset, last - offset, first - own)


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

    def gradient_in(self, rows: torch.Tensor, param: Any) -> torch.Tensor:
        columns = rows.narrow(1, self.columns[param], self.shard_numels[param])
        return columns.reshape(-1)[: zero3.full_numel(param)]

    def own_slice(self, param: Any) -> OwnSlice:
        shard_numel, numel = self.shard_numels[param], zero3.full_numel(param)
        first, last = (min((self.rank + k) * shard_numel, numel) for k in (0, 1))
        return OwnSlice(first, last, self.columns[param])
