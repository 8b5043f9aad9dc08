"""The reduction of ZeRO-1 and ZeRO-2: each group's parameters lie in one flat buffer, cut into stripes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from zerosync_strategy.core.comm.collectives import InFlight, all_gather_rows
from zerosync_strategy.core.comm.profile import phase
from zerosync_strategy.core.comm.stripes import Stripe
from zerosync_strategy.core.engine import zero12
from zerosync_strategy.core.gradients import reducer
from zerosync_strategy.core.gradients.buckets import choose_buckets
from zerosync_strategy.core.gradients.flat import FlatBucket
from zerosync_strategy.core.gradients.layout import FlatLayout, ShardLayout
from zerosync_strategy.core.gradients.reducer import Piece, Pieces, Reducer, pieces_of, sent_by_one_rank
from zerosync_strategy.core.options.config import ZeroSyncConfig

_GATHER_TAG = 2**30  # above the tags of reductions, which may begin before a gather has ended


class Stage12Reducer(Reducer):
    """Reduces into one shard per parameter group.

    Attributes:
        groups: the parameter groups.
        keeps_stock_layout: why the shards have the elements that DeepSpeed gives them, each in one piece; else empty.
    """

    groups: list[zero12.FlatGroup]
    layouts: list[FlatLayout]
    _gathers: dict[int, dict[Stripe, InFlight]]  # in flight, by id of the layout
    _gather_words: dict[int, dict[Stripe, str]]  # for errors, by id of the layout

    def _read_layouts(self) -> list[FlatLayout]:
        zero12.leave_graphs(self.optimizer)
        self.groups = zero12.flat_groups(self.optimizer)
        divisor, dtype = zero12.averaging_divisor(self.optimizer), self.optimizer.communication_data_type
        return [
            FlatLayout(group.process_group, group.params, group.offsets, group.shard_numel, divisor, dtype, group.index)
            for group in self.groups
        ]

    def _make_buckets(self, config: ZeroSyncConfig, limit: int, names: Mapping[Any, str]) -> list[FlatBucket]:
        self.keeps_stock_layout = _why_stock(self.optimizer)
        if self.keeps_stock_layout and (not config.coalesce or config.unreduced_bytes is not None):
            raise ValueError(
                "ZeroSync options 'coalesce=False' and 'grad_memory_budget' reduce gradients in parts, for which the"
                f" shards of stages 1 and 2 must be laid out anew, and {self.keeps_stock_layout}. Leave them out, or"
                " use stage 3."
            )
        common: dict[str, Any] = {"local": self.local, "streams": self.streams, "names": names}
        common |= {"host_memory": self.host_memory, "chunk_bytes": self._chunk_bytes}
        buckets: list[FlatBucket] = []
        self._gather_words = {}
        for layout, chosen in choose_buckets(self.layouts, self.local, config, limit):
            if self.keeps_stock_layout and chosen:
                chosen = [(layout.params, True)]
            ascending = chosen[::-1]
            layout.divide([params[0] for params, _ in ascending])
            below, of_layout = None, []
            for index, (params, deferred) in enumerate(ascending):
                below = FlatBucket(layout, params, deferred, index=index, below=below, **common)
                of_layout.append(below)
            buckets += of_layout[::-1]
            self._gather_words[id(layout)] = {
                stripe: f"the gather of the updated parameters {bucket.names}"
                for stripe, bucket in zip(layout.stripes.all, of_layout, strict=True)
            }
        return buckets

    def _allocate_shards(self) -> None:
        dtype = zero12.shard_dtype(self.optimizer)
        for layout in self.layouts:
            device = zero12.flat_parameters(self.optimizer, layout.group_index).device
            flat = self.host_memory.empty(layout.shard_numel, dtype, device)
            zero12.give_gradient_shard(self.optimizer, layout.group_index, flat)

    def shard_parts(self, layout: ShardLayout, offset: int, numel: int) -> list[torch.Tensor]:
        return [zero12.gradient_shard(self.optimizer, layout.group_index).narrow(0, offset, numel)]

    def hand_over(self) -> None:
        self._gathers = {}  # of a step that raised
        zero12.hand_over_gradients(self.optimizer)

    def compute_norm(self) -> torch.Tensor:
        return zero12.gradient_norm(self.optimizer)

    def combine_norms(self, stock: Callable[[], Any]) -> torch.Tensor:
        with phase("norm"):
            return zero12.norm_of_shards(self.optimizer, map(self._counted, self.layouts))

    def _counted(self, layout: FlatLayout) -> list[torch.Tensor]:
        """Return what this rank counts of its gradient shard in the norm of all gradients."""
        shard = zero12.gradient_shard(self.optimizer, layout.group_index)
        counted = zero12.counted_in_norm(self.optimizer, layout.params)
        if counted is layout.params:
            return [shard]
        slices = (own for param in counted for own in layout.own_slices(param))
        return [shard[own.offset : own.offset + own.stop - own.start] for own in slices] or [shard[:0]]

    def _discard_shards(self) -> None:
        for layout in self.layouts:
            zero12.discard_gradient_shard(self.optimizer, layout.group_index)

    def parameters_floor(self) -> dict[Any, int]:
        return {
            param: sent_by_one_rank(param.numel() * param.element_size(), layout.world_size)
            for layout in self.layouts
            for param in layout.params
        }

    def pieces(self) -> Pieces:
        """As in the base class; what is called when one is stepped begins to gather it."""
        masters = (zero12.master(self.optimizer, layout.group_index) for layout in self.layouts)
        return [
            (flat, list(self._by_stripes(flat, layout))) for flat, layout in zip(masters, self.layouts, strict=True)
        ]

    def _by_stripes(self, master: torch.Tensor, layout: FlatLayout) -> Iterator[Piece]:
        stripes: list[Stripe] = []
        for stripe in layout.stripes:
            stripes.append(stripe)
            begin, end = stripes[0].offset, stripe.offset + stripe.width
            if end - begin >= reducer.PIECE_NUMEL or end == layout.shard_numel:
                yield from pieces_of(master, begin, end, functools.partial(self._gather, layout, stripes))
                stripes = []

    @torch.no_grad()
    def _gather(self, layout: FlatLayout, stripes: Iterable[Stripe]) -> None:
        """Begin to give the parameters that the step has updated to all ranks, in place. Collective."""
        tag = _GATHER_TAG + self._windows_closed % 2**16
        flat = zero12.flat_parameters(self.optimizer, layout.group_index)
        shard = zero12.stepped_shard(self.optimizer, layout.group_index)
        gathers, words = self._gathers.setdefault(id(layout), {}), self._gather_words[id(layout)]
        for stripe in stripes:
            rows = stripe.rows(flat)
            rows[layout.rank].copy_(shard[stripe.offset : stripe.offset + stripe.width], non_blocking=True)
            gathers[stripe] = all_gather_rows(rows, layout.process_group, tag, words[stripe])

    def gather_parameters(self, overlap: Callable[..., None] | None = None) -> None:
        """Give the parameters that the step has updated to all ranks, as far as it has not begun to. Collective.

        Args:
            overlap: takes, by group, the parameters' offsets and the gathers in flight, and waits for them. Without it,
                they are complete on return.
        """
        for layout in self.layouts:
            begun = self._gathers.get(id(layout), {})
            self._gather(layout, (stripe for stripe in layout.stripes if stripe not in begun))
        gathers, self._gathers = self._gathers, {}
        for layout in self.layouts:
            of_layout = gathers.get(id(layout), {})
            if overlap is not None:
                overlap(layout.offsets, of_layout.items())
                continue
            with phase("wait_gather"):
                for pending in of_layout.values():
                    pending.wait()


def _why_stock(optimizer: Any) -> str:
    module = type(optimizer.optimizer).__module__.partition(".")[0]
    if module in _BLOCKWISE:
        return f"the optimizer {type(optimizer.optimizer).__name__} keeps its states by blocks of elements"
    return ""


_BLOCKWISE = frozenset({"bitsandbytes", "torchao"})  # packages whose optimizers have 8-bit or 4-bit states
