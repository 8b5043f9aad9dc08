"""ZeRO-3 with an optimizer that needs whole parameters: gradients are reduced to owners, and not into ZeRO's shards.

Until then they are as ever: on their parameters, on every rank. DeepSpeed's own gradient shards have nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from zerosync_strategy.core.comm.owners import choose_owners
from zerosync_strategy.core.engine import zero, zero3, zero3_optimizer
from zerosync_strategy.core.gradients.buckets import ReduceScatterInput
from zerosync_strategy.core.gradients.owned import OwnedLayout, ToOwners
from zerosync_strategy.core.gradients.stage3 import Stage3Reducer, UnpackedBucket
from zerosync_strategy.core.options.config import ZeroSyncConfig


class OwnedUnpackedBucket(ToOwners, UnpackedBucket):
    """A bucket of stage 3, packed in one call."""

    def __init__(self, *common: Any, **named: Any) -> None:
        super().__init__(*common, **named)
        self._in_order = list(self._lay_out_by_owner())
        self.target = self.layout.own_part(self.params)

    def reduce_scatter_inputs(self, factor: float) -> Iterator[ReduceScatterInput]:
        gradients = [self._gradient(param) for param in self._in_order]
        pieces = self._pieces(self._in_order, gradients)
        memory = pieces[0] if len(pieces) == 1 else torch.cat([piece.to(self.dtype) for piece in pieces])
        self._reads(*gradients)
        if factor != 1.0:
            memory.mul_(factor)
        yield from self._by_owner(memory)


class OwnedStage3Reducer(Stage3Reducer):
    """Reduces each gradient to the rank that owns its parameter.

    Attributes:
        layouts: of what ``full_gradients()`` shows: the gradients of one process group, one after the other.
        shards: of this window: the gradients of what this rank owns.
    """

    layouts: list[OwnedLayout]  # type: ignore[assignment]
    bucket_class = OwnedUnpackedBucket

    def _read_layouts(self) -> list[OwnedLayout]:  # type: ignore[override]
        self.shards: dict[OwnedLayout, torch.Tensor] = {}
        groups = zip(zero3_optimizer.torch_groups(self.optimizer), self.optimizer.optimizer.param_groups, strict=True)
        options = {param: of_group for params, of_group in groups for param in params}
        layouts = []
        for layout in super()._read_layouts():
            described = [(zero3.full_shape(param), options[param]) for param in layout.params]
            owners = choose_owners(described, self.step_cost, layout.process_group)
            offsets = [0, *itertools.accumulate(map(zero3.full_numel, layout.params))][:-1]
            of_params = layout.params, offsets, dict(zip(layout.params, owners, strict=True))
            layouts.append(OwnedLayout(layout.process_group, *of_params, layout.divisor, layout.dtype, 0))
        return layouts

    def _make_buckets(self, config: ZeroSyncConfig, limit: int, common: dict[str, Any]) -> list[UnpackedBucket]:
        buckets = super()._make_buckets(config, limit, common)
        for layout in self.layouts:
            layout.buckets = [bucket for bucket in buckets if bucket.layout is layout]  # type: ignore[misc]
        return buckets

    def allocate_shards(self) -> None:
        dtype = zero.accumulation_dtype(self.optimizer)
        for layout in self.layouts:
            self.shards[layout] = self.local.empty(layout.shard_numel, dtype, layout.params[0].device)

    def shard_parts(self, layout: Any, offset: int, numel: int) -> list[torch.Tensor]:
        return [self.shards[layout].narrow(0, offset, numel)]

    def hand_over(self) -> None:
        """Let DeepSpeed find what this rank counts in the norm. The step reads :attr:`shards`."""
        by_group = [list(self.shards.values())]
        if not self._computes_norm:
            own, nothing = self.own_gradients(), by_group[0][0][:0]
            groups = zero3_optimizer.param_groups(self.optimizer)
            by_group = [[own.get(param, nothing) for param in group] for group in groups]
        zero3_optimizer.give_gradients(self.optimizer, by_group)

    def own_gradients(self) -> dict[Any, torch.Tensor]:
        """Return the averaged gradients of the parameters that this rank owns, flat."""
        return {
            param: part.of(shard)
            for layout, shard in self.shards.items()
            for param in layout.own_offsets
            for part in layout.shard_slices(param)
        }

    def layout_of(self, param: Any) -> OwnedLayout:
        return next(layout for layout in self.layouts if param in layout.owners)

    def _discard_shards(self) -> None:
        super()._discard_shards()
        self.shards.clear()

    def reset_counts(self) -> None:
        super().reset_counts()
        self._discard_shards()
