"""The reduction of ZeRO-1 and ZeRO-2: each group's parameters lie in one flat buffer, cut into equal shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zerosync_strategy.core.comm.collectives import all_gather
from zerosync_strategy.core.config import ZeroSyncConfig
from zerosync_strategy.core.engine import zero12
from zerosync_strategy.core.gradients.flat import FlatBucket, make_flat_buckets
from zerosync_strategy.core.gradients.layout import FlatLayout, ShardLayout
from zerosync_strategy.core.gradients.reducer import Reducer, sent_by_one_rank


class Stage12Reducer(Reducer):
    """Reduces into one shard per parameter group.

    Attributes:
        groups: the parameter groups.
    """

    groups: list[zero12.FlatGroup]
    layouts: list[FlatLayout]

    def _read_layouts(self) -> list[FlatLayout]:
        zero12.leave_graphs(self.optimizer)
        self.groups = zero12.flat_groups(self.optimizer)
        divisor, dtype = zero12.averaging_divisor(self.optimizer), self.optimizer.communication_data_type
        return [
            FlatLayout(group.process_group, group.params, group.offsets, group.shard_numel, divisor, dtype, group.index)
            for group in self.groups
        ]

    def _make_buckets(self, config: ZeroSyncConfig, limit: int, names: Mapping[Any, str]) -> list[FlatBucket]:
        return make_flat_buckets(self.layouts, self.local, self.streams, config, limit, names)

    def _allocate_shards(self) -> None:
        for layout in self.layouts:
            zero12.allocate_gradient_shard(self.optimizer, layout.group_index)

    def shard_parts(self, layout: ShardLayout, offset: int, numel: int) -> list[torch.Tensor]:
        return [zero12.gradient_shard(self.optimizer, layout.group_index).narrow(0, offset, numel)]

    def hand_over(self) -> None:
        zero12.hand_over_gradients(self.optimizer)

    def compute_norm(self) -> torch.Tensor:
        return zero12.gradient_norm(self.optimizer)

    def combine_norms(self, stock: Any) -> torch.Tensor:
        norm: torch.Tensor = stock
        return norm

    def _discard_shards(self) -> None:
        for layout in self.layouts:
            zero12.discard_gradient_shard(self.optimizer, layout.group_index)

    def parameters_floor(self) -> dict[Any, int]:
        return {
            param: sent_by_one_rank(param.numel() * param.element_size(), layout.world_size)
            for layout in self.layouts
            for param in layout.params
        }


def gather_parameters(*, partitioned_param_groups: Any, dp_process_group: Any, **_: Any) -> None:
    """Give the updated parameters of ZeRO-1/2 to all ranks, from where they lie to where they go."""
    for shards, process_group in zip(partitioned_param_groups, dp_process_group, strict=True):
        all_gather(shards, process_group).wait()
