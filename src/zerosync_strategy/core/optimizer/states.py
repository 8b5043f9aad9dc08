"""The optimizer's part of ZeRO-1 and 2: in which order this rank's master weights and states have their elements.

A step has them by stripes, as the gradients are reduced (``comm/stripes.py``). DeepSpeed's checkpoints have them in its
own layout, so that they load anywhere: before one is written or read, ranks exchange their elements, and before the
next step once more. What the optimizer does to an element must not depend on its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from zerosync_strategy.core.comm.stripes import ShardSlice
from zerosync_strategy.core.engine import zero12
from zerosync_strategy.core.gradients.stage12 import FlatLayout, FlatShards
from zerosync_strategy.core.gradients.striped import StripedLayout


class StripedStates:
    """Master weights and states of the ZeRO-1 or ZeRO-2 optimizer of ``shards``."""

    def __init__(self, shards: FlatShards) -> None:
        self._optimizer, self._layouts = shards.optimizer, shards.layouts
        self._is_stock = True  # in DeepSpeed's layout
        self._is_checked = False

    def to_stripes(self) -> None:
        """Before a step. A collective call where they are in DeepSpeed's layout."""
        self._move(to_stock=False)

    def to_stock(self) -> None:
        """Before DeepSpeed reads or writes them. A collective call after a step."""
        self._move(to_stock=True)

    def slices(self, layout: FlatLayout) -> list[ShardSlice]:
        """Return which elements of a flat buffer this rank has at present."""
        return layout.slices(self._is_stock)

    def read(self, param: Any, key: str | None) -> torch.Tensor:
        """Return the master weights of ``param`` or its state ``key`` (``ValueError``: none), in full in fp32.
        Collective.
        """
        layout = self.layout_of(param)
        return layout.read(self._shard(layout, key), param, self._is_stock)

    def write(self, param: Any, value: torch.Tensor, key: str | None) -> None:
        """Set what :meth:`read` returns to ``value``, the same on all ranks."""
        layout = self.layout_of(param)
        layout.write(value, self._shard(layout, key), param, self._is_stock)

    def check(self) -> None:
        """After a step: a ``RuntimeError`` where states are neither one value for each element nor one for all.

        Those cannot be brought into DeepSpeed's layout.
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
        """Yield the layouts whose shards may have to be brought into DeepSpeed's own."""
        for layout in self._layouts:
            if isinstance(layout, StripedLayout) and not layout.stripes.is_stock:
                yield layout

    # ---- helpers -------------------------------------------------------------------------------------------------

    def _move(self, to_stock: bool) -> None:
        if self._is_stock == to_stock:
            return
        for layout in self._striped:
            flat = zero12.flat_parameters(self._optimizer, layout.group_index)
            master = zero12.master(self._optimizer, layout.group_index)
            if master.dtype == flat.dtype:  # they are the same
                for own in layout.stripes.slices(to_stock):
                    own.of(master.data).copy_(flat[own.start : own.stop])
            else:
                self._exchange(master.data, layout, to_stock, flat.device)
            for value in self._states_of(master).values():
                if isinstance(value, torch.Tensor) and value.shape == master.shape:
                    self._exchange(value, layout, to_stock, flat.device)
        self._is_stock = to_stock

    def _exchange(self, shard: torch.Tensor, layout: StripedLayout, to_stock: bool, device: torch.device) -> None:
        shard.copy_(layout.stripes.exchange(shard, not to_stock, layout.process_group, device))

    def _states_of(self, master: Any) -> dict[str, Any]:
        return self._optimizer.optimizer.state.get(master, {})

    def layout_of(self, param: Any) -> FlatLayout:
        return next(layout for layout in self._layouts if param in layout.offsets)

    def _shard(self, layout: FlatLayout, key: str | None) -> torch.Tensor:
        master = zero12.master(self._optimizer, layout.group_index)
        if key is None:
            return master.data
        value = self._states_of(master).get(key)
        if not isinstance(value, torch.Tensor) or value.shape != master.shape:
            raise ValueError(f"{key!r} is no state of the optimizer's elements.")
        return value
