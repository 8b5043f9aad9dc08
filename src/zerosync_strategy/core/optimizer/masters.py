"""This rank's master weights by ZeRO stage, and the slices in which they are stepped and gathered."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from zerosync_strategy.core.comm.collectives import InFlight
from zerosync_strategy.core.comm.journal import phase
from zerosync_strategy.core.engine import zero3, zero3_optimizer, zero12
from zerosync_strategy.core.engine.types import Zero12Optimizer
from zerosync_strategy.core.engine.zero import MasterShard
from zerosync_strategy.core.gradients.buckets import GradientBucket
from zerosync_strategy.core.gradients.layout import ShardSlice
from zerosync_strategy.core.gradients.owned import OwnedPlacement
from zerosync_strategy.core.gradients.stage3 import PerParamShards
from zerosync_strategy.core.gradients.stage12 import FlatLayout, FlatShards, StripedLayout, StripePlacement


class StripedStates:
    """Master weights and states of the ZeRO-1 or ZeRO-2 optimizer of ``shards``."""

    def __init__(self, shards: FlatShards) -> None:
        self._optimizer, self._layouts = shards.optimizer, shards.layouts
        self._is_stock = True  # in DeepSpeed's layout
        self._is_checked = False

    def lay_out(self, stock: bool) -> None:
        """Move shards into stripes, before a step, or into DeepSpeed's layout, before DeepSpeed reads or writes them.

        Collective if they are in the other layout.
        """
        if self._is_stock == stock:
            return
        for layout in self._striped:
            flat = zero12.flat_parameters(self._optimizer, layout.group_index)
            master = zero12.master(self._optimizer, layout.group_index)
            if master.dtype == flat.dtype:  # the flat buffer has the same values
                for own in layout.stripes.slices(stock):
                    own.of(master.data).copy_(flat[own.start : own.stop])
            else:
                self._exchange(master.data, layout, stock, flat.device)
            for value in self._states_of(master).values():
                if isinstance(value, torch.Tensor) and value.shape == master.shape:
                    self._exchange(value, layout, stock, flat.device)
        self._is_stock = stock

    def slices(self, layout: FlatLayout) -> list[ShardSlice]:
        """Return the elements of a flat buffer that are in this rank's shard in the current layout."""
        return layout.slices(self._is_stock)

    def read(self, param: nn.Parameter, key: str | None) -> torch.Tensor:
        """Return the full master weights of ``param`` in fp32, or its state ``key``. Collective.

        Raises a ``ValueError`` if there is no such state.
        """
        layout = self.layout_of(param)
        return layout.read(self._shard(layout, key), param, self._is_stock)

    def write(self, param: nn.Parameter, value: torch.Tensor, key: str | None) -> None:
        """Set what :meth:`read` returns to ``value``, the same on all ranks."""
        layout = self.layout_of(param)
        layout.write(value, self._shard(layout, key), param, self._is_stock)

    def check(self) -> None:
        """Raise a ``RuntimeError``, after a step, if a state has neither one value per element nor one value in all.

        No other state can be moved between the layouts.
        """
        if self._is_checked:
            return
        for layout in self._striped:
            master = zero12.master(self._optimizer, layout.group_index)
            for name, value in self._states_of(master).items():
                self._is_checked = True
                if isinstance(value, torch.Tensor) and value.shape != master.shape and value.numel() > 1:
                    raise RuntimeError(
                        f"step() found that the optimizer {type(self._optimizer.optimizer).__name__} keeps a state"
                        f" {name!r} of shape {tuple(value.shape)} for {master.numel()} elements. On stages 1 and 2,"
                        " states must have one value for each element, or one for all. Use AdamW, SGD or another such"
                        " optimizer, or stage 3."
                    )

    @property
    def _striped(self) -> Iterator[StripedLayout]:
        """Yield the layouts whose stripes differ from DeepSpeed's layout."""
        for layout in self._layouts:
            if isinstance(layout, StripedLayout) and not layout.stripes.is_stock:
                yield layout

    # ---- helpers -------------------------------------------------------------------------------------------------

    def _exchange(self, shard: torch.Tensor, layout: StripedLayout, to_stock: bool, device: torch.device) -> None:
        shard.copy_(layout.stripes.exchange(shard, not to_stock, layout.process_group, layout.counter, device))

    def _states_of(self, master: torch.Tensor) -> dict[str, Any]:
        return self._optimizer.optimizer.state.get(master, {})

    def layout_of(self, param: nn.Parameter) -> FlatLayout:
        return next(layout for layout in self._layouts if param in layout.offsets)

    def _shard(self, layout: FlatLayout, key: str | None) -> torch.Tensor:
        master = zero12.master(self._optimizer, layout.group_index)
        if key is None:
            return master.data
        value = self._states_of(master).get(key)
        if not isinstance(value, torch.Tensor) or value.shape != master.shape:
            raise ValueError(f"{key!r} is no state of the optimizer's elements.")
        return value


STEP_NUMEL = 2**18
"""Elements of a shard that are stepped at a time on the host. With fewer, the overhead exceeds the gain. With more, the
temporary tensors do not fit into a processor's cache."""
_GATHER_TAG = 2**30  # above the tags of reductions, which may begin before a gather has ended


class StepSlice(NamedTuple):
    """Elements of master weights that are stepped at a time; ``stepped`` is called afterwards."""

    begin: int
    end: int
    stepped: Callable[[], None] | None


StepSlices = Sequence[tuple[torch.Tensor, Sequence[StepSlice]]]
"""Master weights, each with its slices."""


def step_slices(
    master: torch.Tensor, begin: int, end: int, stepped: Callable[[], None] | None = None
) -> Iterator[StepSlice]:
    """Yield slices of ``master`` from ``begin`` to ``end``. The last one has ``stepped``."""
    count = max(1, (end - begin) // STEP_NUMEL) if master.device.type == "cpu" else 1
    for first in range(begin, begin + (count - 1) * STEP_NUMEL, STEP_NUMEL):
        yield StepSlice(first, first + STEP_NUMEL, None)
    yield StepSlice(begin + (count - 1) * STEP_NUMEL, end, stepped)


class MasterPart(NamedTuple):
    """``numel`` elements of ``param`` from its element ``start``, at ``offset`` of the ``number``-th master tensor."""

    param: nn.Parameter
    number: int
    start: int
    offset: int
    numel: int


class Masters(ABC):
    """The master weights of one ZeRO optimizer."""

    @abstractmethod
    def parts(self) -> Iterator[MasterPart]:
        """Yield what this rank has of each parameter as in a step; of one of which it has nothing, an empty part."""

    @abstractmethod
    def groups(self) -> list[list[nn.Parameter]]:
        """Return the parameters, by the groups of the torch optimizer, in its order."""

    @abstractmethod
    def by_param(self) -> list[MasterShard]:
        """Return each master tensor, with the elements of each parameter in it, as in a step."""

    @abstractmethod
    def slices(self) -> StepSlices:
        """Return each master tensor with the slices in which it can be stepped; no slices: stepped as a whole."""

    def states_made(self) -> None:  # noqa: B027  (no parameter of ZeRO-3 refers to them)
        """Link new states of the torch optimizer to the parameters, after its first step."""

    def in_groups(self) -> AbstractContextManager[None]:
        """While active, the groups of the torch optimizer have the master weights."""
        return nullcontext()


class ShardMasters(Masters):
    """The master weights of ZeRO-3."""

    def __init__(self, shards: PerParamShards) -> None:
        self._optimizer = shards.optimizer

    def by_param(self) -> list[MasterShard]:
        return zero3_optimizer.master_shards(self._optimizer)

    def groups(self) -> list[list[nn.Parameter]]:
        return zero3_optimizer.torch_groups(self._optimizer)

    def parts(self) -> Iterator[MasterPart]:
        for index, master in enumerate(self.by_param()):
            for param, begin, _ in master.slices:
                start, numel = zero3.own_range(param)
                yield MasterPart(param, index, start, begin, numel)

    def slices(self) -> StepSlices:
        # Nothing is sent by slice, but small temporary tensors are faster to allocate.
        masters = zero3_optimizer.flat_master_weights(self._optimizer)
        return [(flat, list(step_slices(flat, 0, flat.numel()))) for flat in masters]

    def in_groups(self) -> AbstractContextManager[None]:
        return zero3_optimizer.masters_in_groups(self._optimizer)


_ShardOf = Callable[[Zero12Optimizer, int], torch.Tensor]  # of an optimizer and the index of a group


class FlatMasters(Masters):
    """The master weights of ZeRO-1 and 2. Stepped slices are all-gathered while the rest is stepped (H3).

    ``windows`` returns a number of windows, the same on all ranks (W4).
    """

    def __init__(self, shards: FlatShards, windows: Callable[[], int]) -> None:
        self._shards, self._optimizer, self._windows = shards, shards.optimizer, windows
        self._in_flight: dict[GradientBucket, InFlight] = {}  # gathers

    def by_param(self) -> list[MasterShard]:
        masters = []
        for layout in self._shards.layouts:
            slices = [
                (param, own.offset, own.offset + own.stop - own.start)
                for param in layout.params
                for own in layout.shard_slices(param)
            ]
            slices.sort(key=lambda each: each[1])
            masters.append(MasterShard(zero12.master(self._optimizer, layout.group_index), slices))
        return masters

    def groups(self) -> list[list[nn.Parameter]]:
        return [zero12.params_in_order(self._optimizer, index) for index, _ in enumerate(self._optimizer.param_groups)]

    def parts(self) -> Iterator[MasterPart]:
        for index, layout in enumerate(self._shards.layouts):
            for param in layout.params:
                for own in layout.shard_slices(param) or [ShardSlice(0, 0, 0)]:
                    yield MasterPart(param, index, own.start, own.offset, own.stop - own.start)

    def states_made(self) -> None:
        zero12.relink_states(self._optimizer)

    def slices(self) -> StepSlices:
        """Return slices as in the base class; after each one, its gather is launched."""
        if self._shards.whole:
            return []
        masters = ((layout, zero12.master(self._optimizer, layout.group_index)) for layout in self._shards.layouts)
        return [(flat, list(self._by_buckets(flat, layout))) for layout, flat in masters]

    def _by_buckets(self, master: torch.Tensor, layout: FlatLayout) -> Iterator[StepSlice]:
        """Yield slices. A gather follows every few buckets: after ``STEP_NUMEL`` elements or more."""
        buckets: list[GradientBucket] = []
        for bucket in self._buckets(layout):
            buckets.append(bucket)
            begin, end = buckets[0].placement.offset, bucket.placement.offset + bucket.placement.width
            if end - begin >= STEP_NUMEL or end == layout.shard_numel:
                yield from step_slices(master, begin, end, functools.partial(self._gather, layout, buckets))
                buckets = []

    def _buckets(self, layout: FlatLayout) -> list[GradientBucket]:
        return [bucket for bucket in self._shards.buckets_of[layout] if not bucket.placement.is_empty]

    # ---- from masters to the parameters of all ranks -------------------------------------------------------------

    @torch.no_grad()
    def _gather(
        self, layout: FlatLayout, buckets: list[GradientBucket], shard_of: _ShardOf = zero12.stepped_shard
    ) -> None:
        """Launch the in-place gathers of the updated parameters of ``buckets``. Collective."""
        tag = _GATHER_TAG + self._windows() % 2**16
        flat = zero12.flat_parameters(self._optimizer, layout.group_index)
        shard = shard_of(self._optimizer, layout.group_index)
        for bucket in buckets:
            label, placement = f"the gather of the updated parameters {bucket.names}", bucket.placement
            assert isinstance(placement, (StripePlacement, OwnedPlacement))
            self._in_flight[bucket] = placement.give(flat, shard, tag, label)

    def forget_gathers(self) -> None:
        """Forget the gathers of a step that raised, without waiting for them."""
        self._in_flight.clear()

    def give_changed(self) -> None:
        """Gather the parameters of master weights that something other than a step has changed. Collective.

        The next use of the parameters waits for these gathers (U2).
        """
        self.forget_gathers()
        self.give(zero12.changed_shard)

    def join_gathers(self) -> None:
        """Make the current stream wait for the gathers of a step that raised, on a device with streams."""
        if self._shards.streams.concurrent:  # elsewhere the host would wait for other ranks
            for gather in self._in_flight.values():
                gather.wait()

    def give(self, shard_of: _ShardOf = zero12.stepped_shard) -> None:
        """Gather all updated parameters that the step has not gathered yet, and wait for all gathers. Collective."""
        for layout in self._shards.layouts:
            buckets = [bucket for bucket in self._buckets(layout) if bucket not in self._in_flight]
            self._gather(layout, buckets, shard_of)
        with phase("wait_gather"):
            for layout in self._shards.layouts:
                for bucket in self._buckets(layout):
                    self._in_flight.pop(bucket).wait()
