"""The reduction of ZeRO-1 and ZeRO-2: each group's parameters lie in one flat buffer, cut into stripes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zerosync_strategy.core.comm.collectives import phase
from zerosync_strategy.core.comm.nodes import Sent
from zerosync_strategy.core.engine import zero, zero12
from zerosync_strategy.core.gradients import reducer
from zerosync_strategy.core.gradients.buckets import Level, choose_buckets
from zerosync_strategy.core.gradients.flat import FlatBucket, FlatLayout
from zerosync_strategy.core.gradients.reducer import Reducer, StepSlice, StepSlices, step_slices
from zerosync_strategy.core.options.config import ZeroSyncConfig

_GATHER_TAG = 2**30  # above the tags of reductions, which may begin before a gather has ended
_ShardOf = Callable[[Any, int], torch.Tensor]  # of an optimizer's group


class Stage12Reducer(Reducer):
    """Reduces into one shard per parameter group.

    Attributes:
        keeps_stock_layout: why the shards have the elements that DeepSpeed gives them, each in one piece; else empty.
    """

    groups: list[zero12.FlatGroup]
    layouts: list[FlatLayout]
    buckets: list[FlatBucket]

    def _read_layouts(self) -> list[FlatLayout]:
        zero12.leave_graphs(self.optimizer)
        self.groups = zero12.flat_groups(self.optimizer)
        divisor, dtype = zero12.averaging_divisor(self.optimizer), self._dtype
        return [
            FlatLayout(group.process_group, group.params, group.offsets, group.shard_numel, divisor, dtype, group.index)
            for group in self.groups
        ]

    def _make_buckets(self, config: ZeroSyncConfig, limit: int, common: dict[str, Any]) -> list[FlatBucket]:
        self.keeps_stock_layout = _why_stock(self.optimizer)
        if self.keeps_stock_layout and (not config.coalesce or config.gradients.device is not None):
            raise ValueError(
                "ZeroSync options 'coalesce=False' and 'grad_memory_budget' reduce gradients in parts, for which the"
                f" shards of stages 1 and 2 must be laid out anew, and {self.keeps_stock_layout}. Leave them out, or"
                " use stage 3."
            )
        buckets: list[FlatBucket] = []
        for layout, chosen in choose_buckets(self.layouts, self.local, config, limit):
            if self.keeps_stock_layout and chosen:
                chosen = [(layout.params, Level.WHOLE)]
            layout.divide(chosen[::-1], **common)
            buckets += layout.buckets[::-1]
        return buckets

    def allocate_shards(self) -> None:
        dtype = zero.accumulation_dtype(self.optimizer)
        for layout in self.layouts:
            device = zero12.flat_parameters(self.optimizer, layout.group_index).device
            flat = self.local.empty(layout.shard_numel, dtype, device)
            zero12.give_gradient_shard(self.optimizer, layout.group_index, flat)

    def shard_parts(self, layout: FlatLayout, offset: int, numel: int) -> list[torch.Tensor]:
        return [zero12.gradient_shard(self.optimizer, layout.group_index).narrow(0, offset, numel)]

    def hand_over(self) -> None:
        self._forget_gathers()  # of a step that raised
        zero12.hand_over_gradients(self.optimizer)

    def _forget_gathers(self) -> None:
        for bucket in self.buckets:
            bucket.gather = None

    def _compute_norm(self) -> torch.Tensor:
        return zero12.norm_of_shards(self.optimizer, map(self._counted, self.layouts))

    def _counted(self, layout: FlatLayout) -> list[torch.Tensor]:
        """Return what this rank counts of its gradient shard in the norm of all gradients."""
        shard = zero12.gradient_shard(self.optimizer, layout.group_index)
        counted = zero12.counted_in_norm(self.optimizer, layout.params)
        if counted is layout.params:
            return [shard]
        return [own.of(shard) for param in counted for own in layout.shard_slices(param)] or [shard[:0]]

    def _discard_shards(self) -> None:
        for layout in self.layouts:
            zero12.discard_gradient_shard(self.optimizer, layout.group_index)

    def parameters_floor(self) -> dict[Any, Sent]:
        return {
            param: self.topology.sent(param.numel() * param.element_size(), layout.process_group)
            for layout in self.layouts
            for param in layout.params
        }

    def states_made(self) -> None:
        zero12.relink_states(self.optimizer)

    def master_shards(self) -> list[zero.MasterShard]:
        masters = []
        for layout in self.layouts:
            slices = [
                (param, own.offset, own.offset + own.stop - own.start)
                for param in layout.params
                for own in layout.shard_slices(param)
            ]
            slices.sort(key=lambda each: each[1])
            masters.append(zero.MasterShard(zero12.master(self.optimizer, layout.group_index), slices))
        return masters

    def step_slices(self) -> StepSlices:
        """As in the base class; what is called when one is stepped begins to gather it."""
        masters = (zero12.master(self.optimizer, layout.group_index) for layout in self.layouts)
        return [
            (flat, list(self._by_buckets(flat, layout))) for flat, layout in zip(masters, self.layouts, strict=True)
        ]

    def _by_buckets(self, master: torch.Tensor, layout: FlatLayout) -> Iterator[StepSlice]:
        """Yield slices of a few buckets each, as many as are worth a gather."""
        buckets: list[FlatBucket] = []
        for bucket in (bucket for bucket in layout.buckets if not bucket.is_empty):
            buckets.append(bucket)
            begin, end = buckets[0].stripe.offset, bucket.stripe.offset + bucket.stripe.width
            if end - begin >= reducer.STEP_NUMEL or end == layout.shard_numel:
                yield from step_slices(master, begin, end, functools.partial(self._gather, layout, buckets))
                buckets = []

    @torch.no_grad()
    def _gather(self, layout: FlatLayout, buckets: list[FlatBucket], shard_of: _ShardOf = zero12.stepped_shard) -> None:
        """Begin to give the parameters that the step has updated to all ranks, in place. Collective."""
        tag = _GATHER_TAG + self.pipeline.windows_closed % 2**16
        flat = zero12.flat_parameters(self.optimizer, layout.group_index)
        shard = shard_of(self.optimizer, layout.group_index)
        for bucket in buckets:
            bucket.launch_gather(flat, shard, tag)

    def give_masters(self) -> None:
        """Give all ranks the parameters of master weights that were changed otherwise than by a step. Collective.

        What uses the parameters next comes after their gathers (U2).
        """
        self._forget_gathers()
        self.gather_parameters(shard_of=zero12.changed_shard)

    def join_gathers(self) -> None:
        """The step has raised: on a device, whatever uses parameters next comes after the gathers that it began."""
        for bucket in self.buckets:
            if bucket.gather is not None and self.streams.concurrent:  # elsewhere the host would wait for other ranks
                bucket.gather.wait()

    def gather_parameters(
        self, overlap: Callable[..., None] | None = None, shard_of: _ShardOf = zero12.stepped_shard
    ) -> None:
        """Give the parameters that the step has updated to all ranks, as far as it has not begun to. Collective.

        ``overlap`` takes, by group, the parameters' offsets and the stripes with their gathers in flight, and waits for
        them. Without it, they are complete on return.
        """
        by_layout = [(layout, [bucket for bucket in layout.buckets if not bucket.is_empty]) for layout in self.layouts]
        for layout, buckets in by_layout:
            self._gather(layout, [bucket for bucket in buckets if bucket.gather is None], shard_of)
        for layout, buckets in by_layout:
            gathers = [(bucket.stripe, bucket.gather) for bucket in buckets if bucket.gather is not None]
            for bucket in buckets:
                bucket.gather = None
            if overlap is not None:
                overlap(layout.offsets, gathers)
                continue
            with phase("wait_gather"):
                for _, gather in gathers:
                    gather.wait()


def _why_stock(optimizer: Any) -> str:
    module = type(optimizer.optimizer).__module__.partition(".")[0]
    if module in _BLOCKWISE:
        return f"the optimizer {type(optimizer.optimizer).__name__} keeps its states by blocks of elements"
    return ""


_BLOCKWISE = frozenset({"bitsandbytes", "torchao"})  # packages whose optimizers have 8-bit or 4-bit states
