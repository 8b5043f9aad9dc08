"""The layout of ZeRO-3: each parameter is cut by itself into even shards, the last one padded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from zerosync_strategy.core.comm.nodes import Nodes
from zerosync_strategy.core.comm.stripes import ShardSlice
from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.gradients.placement import Read, ReduceScatterInput, RowPlacement, ShardLayout, with_zeros


class PerParamLayout(ShardLayout):
    """The parameters' shards lie one after the other: each has so many ``columns``, from its ``begins`` on."""

    def __init__(self, process_group: Any, params: Sequence[Any], *common: Any) -> None:
        super().__init__(process_group, params, *common)
        numels = list(map(zero3.shard_numel, self.params))
        self.columns = dict(zip(self.params, numels, strict=True))
        self.begins = dict(zip(self.params, accumulate([0, *numels[:-1]]), strict=True))
        self.begin_list = list(self.begins.values())
        self.shard_numel = sum(numels)

    def divide(self, buckets: Sequence[Sequence[Any]]) -> list[ColumnPlacement]:
        return [ColumnPlacement(self, params) for params in buckets]

    def shard_slices(self, param: Any, stock: bool = False) -> list[ShardSlice]:
        columns, numel = self.columns[param], zero3.full_numel(param)
        first, last = (min((self.rank + k) * columns, numel) for k in (0, 1))
        return [ShardSlice(first, last, self.begins[param])]

    def gather_shards(self, dtype: torch.dtype, device: torch.device, read: Read) -> torch.Tensor:
        rows = torch.empty(self.world_size, self.shard_numel, dtype=dtype, device=device)
        read(rows[self.rank], 0)
        self.all_gather(rows).wait()
        return rows

    def gradient_in(self, memory: torch.Tensor, param: Any) -> torch.Tensor:
        columns = memory.narrow(1, self.begins[param], self.columns[param])
        return columns.reshape(-1)[: zero3.full_numel(param)]


class ColumnPlacement(RowPlacement):
    """Of a bucket whose parameters are neighbours in ``layout``."""

    def __init__(self, layout: PerParamLayout, params: Sequence[Any]) -> None:
        super().__init__(layout, layout.begins[params[0]], sum(layout.columns[param] for param in params), params)
        # torch._chunk_cat cuts a tensor as ZeRO-3 does.
        for param in params:
            assert layout.columns[param] == -(-zero3.full_numel(param) // layout.world_size)

    def inputs(self, memory: torch.Tensor, most: int, nodes: Nodes | None) -> Iterator[ReduceScatterInput]:
        # Packed, it has the size of a bucket already; a parameter as it lies may be larger.
        yield from super().inputs(memory, most if len(self.order) == 1 else self.width, nodes)

    def pack(
        self, gradients: Sequence[torch.Tensor | None], dtype: torch.dtype, above: torch.Tensor | None
    ) -> torch.Tensor:
        """As the rows of all ranks, in the dtype of the reduction."""
        to, shape = self._layout.dtype, (self._layout.world_size, self.width)
        device = self.order[0].device
        found = {gradient.dtype for gradient in gradients if gradient is not None}
        if not found:
            return torch.zeros(shape, dtype=to, device=device).view(-1)
        pieces = with_zeros(self.order, gradients, dtype if found == {dtype} else to)
        if self._is_packed(pieces):
            return pieces[0].to(to)
        packed = torch.empty(shape, dtype=to, device=device)
        torch._chunk_cat(pieces, 0, shape[0], out=packed)
        return packed.view(-1)
