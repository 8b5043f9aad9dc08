"""The reduction of ZeRO-1 and ZeRO-2: each group's parameters lie in one flat buffer, cut into equal shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import all_gather
from zerosync_strategy.core.engine import zero12
from zerosync_strategy.core.gradients.layout import ShardLayout, cut_flat
from zerosync_strategy.core.gradients.reducer import Reducer, sent_by_one_rank


class Stage12Reducer(Reducer):
    """Reduces into one shard per parameter group.

    Attributes:
        groups: the parameter groups.
    """

    groups: list[zero12.FlatGroup]

    def _read_layouts(self) -> list[ShardLayout]:
        self.groups = zero12.flat_groups(self.optimizer)
        divisor, dtype = zero12.averaging_divisor(self.optimizer), self.optimizer.communication_data_type
        return [
            ShardLayout(
                group.process_group, group.params, group.shard_numel,
                cut_flat(group.params, group.offsets, group.shard_numel, dist.get_world_size(group.process_group)),
                divisor, dtype, group.index,
            )
            for group in self.groups
        ]  # fmt: skip

    def _zero_shards(self) -> None:
        for layout in self.layouts:
            zero12.allocate_gradient_shard(self.optimizer, layout.group_index)

    def shard_tensors(self, layout: ShardLayout) -> list[tuple[int, torch.Tensor]]:
        return [(0, zero12.gradient_shard(self.optimizer, layout.group_index))]

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
