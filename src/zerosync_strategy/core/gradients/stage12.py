"""The gradient shards of ZeRO-1 and ZeRO-2: one per group, whose parameters lie in one flat buffer."""

from __future__ import annotations

from typing import Any

import torch

from zerosync_strategy.core.comm.nodes import Sent
from zerosync_strategy.core.comm.owners import choose_owners
from zerosync_strategy.core.engine import zero, zero12
from zerosync_strategy.core.gradients.buckets import GradientBucket, Level, choose_buckets
from zerosync_strategy.core.gradients.owned import OwnedLayout
from zerosync_strategy.core.gradients.shards import GradientShards
from zerosync_strategy.core.gradients.striped import StripedLayout
from zerosync_strategy.core.options.config import ZeroSyncConfig

FlatLayout = StripedLayout | OwnedLayout


class FlatShards(GradientShards):
    """In DeepSpeed's ``averaged_gradients``.

    Attributes:
        keeps_stock_layout: why the shards have the elements that DeepSpeed gives them, each in one piece; else empty.
    """

    layouts: list[FlatLayout]

    def _read_layouts(self, config: ZeroSyncConfig) -> list[FlatLayout]:
        zero12.leave_graphs(self.optimizer)
        self.groups = zero12.flat_groups(self.optimizer)
        self.buckets_of: dict[FlatLayout, list[GradientBucket]] = {}
        divisor = zero12.averaging_divisor(self.optimizer)
        in_order = [
            dict(sorted(zip(group.params, group.offsets, strict=True), key=lambda pair: pair[1]))
            for group in self.groups
        ]
        owners = self._choose_owners(in_order, config) if self.whole else None
        layouts: list[FlatLayout] = []
        for group, offsets in zip(self.groups, in_order, strict=True):
            nodes = self.topology.of(group.process_group)
            common = (group.process_group, divisor, self.dtype, nodes, group.index)
            if owners is None:
                layouts.append(StripedLayout(offsets, group.shard_numel, *common))
            else:
                layouts.append(OwnedLayout(offsets, owners, *common))
        return layouts

    def _choose_owners(self, in_order: list[dict[Any, int]], config: ZeroSyncConfig) -> dict[Any, int]:
        by_group: dict[Any, list[Any]] = {}
        options: dict[Any, Any] = {}
        for group, params in zip(self.groups, in_order, strict=True):
            by_group.setdefault(group.process_group, []).extend(params)
            options |= dict.fromkeys(params, self.optimizer.optimizer.param_groups[group.index])
        owners: dict[Any, int] = {}
        for process_group, params_of_group in by_group.items():
            described = [(param.shape, options[param]) for param in params_of_group]
            chosen = choose_owners(described, config.cost_function, process_group)
            owners |= zip(params_of_group, chosen, strict=True)
        return owners

    def make_buckets(self, config: ZeroSyncConfig, limit: int, common: dict[str, Any]) -> list[GradientBucket]:
        self.keeps_stock_layout = _why_stock(self.optimizer)
        if self.keeps_stock_layout and (not config.coalesce or config.gradients.device is not None):
            raise ValueError(
                "ZeroSync options 'coalesce=False' and 'grad_memory_budget' reduce gradients in parts, for which the"
                f" shards of stages 1 and 2 must be laid out anew, and {self.keeps_stock_layout}. Leave them out, or"
                " use stage 3."
            )
        buckets: list[GradientBucket] = []
        layout: Any
        for layout, chosen in choose_buckets(self.layouts, self.local, config, limit):
            if self.keeps_stock_layout and chosen:
                chosen = [(layout.params, Level.WHOLE)]
            self.buckets_of[layout] = of_layout = list[GradientBucket]()
            placements = layout.divide([params for params, _ in chosen])
            for (params, level), placement in zip(chosen, placements, strict=True):
                below = of_layout[-1] if of_layout and not self.whole else None
                of_layout.append(GradientBucket(layout, params, level, placement, below=below, **common))
            buckets += of_layout[::-1]
        return buckets

    def allocate(self) -> None:
        dtype = zero.accumulation_dtype(self.optimizer)
        for layout in self.layouts:
            device = zero12.flat_parameters(self.optimizer, layout.group_index).device
            flat = self.local.empty(layout.shard_numel, dtype, device)
            zero12.give_gradient_shard(self.optimizer, layout.group_index, flat)

    def parts(self, layout: FlatLayout, offset: int, numel: int) -> list[torch.Tensor]:
        return [zero12.gradient_shard(self.optimizer, layout.group_index).narrow(0, offset, numel)]

    def hand_over(self) -> None:
        zero12.hand_over_gradients(self.optimizer)

    def norm(self) -> torch.Tensor:
        return zero12.norm_of_shards(self.optimizer, map(self._counted, self.layouts))

    def _counted(self, layout: FlatLayout) -> list[torch.Tensor]:
        """Return what this rank counts of its gradient shard in the norm of all gradients."""
        shard = zero12.gradient_shard(self.optimizer, layout.group_index)
        counted = zero12.counted_in_norm(self.optimizer, layout.params)
        if counted is layout.params:
            return [shard]
        return [own.of(shard) for param in counted for own in layout.shard_slices(param)] or [shard[:0]]

    def discard(self) -> None:
        for layout in self.layouts:
            zero12.give_gradient_shard(self.optimizer, layout.group_index, None)

    def parameters_floor(self) -> dict[Any, Sent]:
        return {
            param: self.topology.sent(param.numel() * param.element_size(), layout.process_group)
            for layout in self.layouts
            for param in layout.params
        }


def _why_stock(optimizer: Any) -> str:
    module = type(optimizer.optimizer).__module__.partition(".")[0]
    if module in _BLOCKWISE:
        return f"the optimizer {type(optimizer.optimizer).__name__} keeps its states by blocks of elements"
    return ""


_BLOCKWISE = frozenset({"bitsandbytes", "torchao"})  # packages whose optimizers have 8-bit or 4-bit states
