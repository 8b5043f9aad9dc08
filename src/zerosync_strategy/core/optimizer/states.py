"""The optimizer's part of ZeRO-1 and 2: in which order this rank's master weights and states have their elements.

A step has them by stripes, as the gradients are reduced (``comm/stripes.py``). DeepSpeed's checkpoints have them in its
own layout, so that they load anywhere: before one is written or read, ranks exchange their elements, and before the
next step once more. What the optimizer does to an element must not depend on its place, which is true of all that ZeRO
can train with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zerosync_strategy.core.comm.stripes import OwnSlice
from zerosync_strategy.core.engine import zero12
from zerosync_strategy.core.engine.zero import MasterWeights
from zerosync_strategy.core.gradients.layout import FlatLayout


class StripedStates:
    """Master weights and states of one ZeRO-1 or ZeRO-2 optimizer.

    Args:
        optimizer: of ZeRO.
        stepping: returns the torch optimizer that steps the master weights.
        layouts: of the parameter groups.
    """

    def __init__(self, optimizer: Any, stepping: Callable[[], Any], layouts: Sequence[FlatLayout]) -> None:
        self._optimizer = optimizer
        self._stepping = stepping
        self._layouts = layouts
        self._is_stock = True  # in DeepSpeed's layout
        self._is_checked = False

    def to_stripes(self) -> None:
        """Before a step. A collective call where they are in DeepSpeed's layout."""
        self._move(to_stock=False)

    def to_stock(self) -> None:
        """Before DeepSpeed reads or writes them. A collective call after a step."""
        self._move(to_stock=True)

    def own(self, layout: FlatLayout) -> list[OwnSlice]:
        """Return which elements of a flat buffer this rank has at present."""
        return layout.stripes.own(self._is_stock)

    def read(self, param: Any, key: str | None) -> torch.Tensor:
        """Return the master weights of ``param``, or its state of the name ``key``, in full and in fp32. Collective.

        Raises:
            ValueError: there is no such state.
        """
        layout = self._layout_of(param)
        return full_from(self._shard(layout, key), layout, layout.own_slices(param, self._is_stock), param)

    def write(self, param: Any, value: torch.Tensor, key: str | None) -> None:
        """Set what :meth:`read` returns to ``value``, the same on all ranks.

        Raises:
            ValueError: there is no such state.
        """
        layout = self._layout_of(param)
        into_shard(value, self._shard(layout, key), layout.own_slices(param, self._is_stock))

    def master_weights(self) -> list[MasterWeights]:
        """Return this rank's master weights of each group, by the parameters that they are of."""
        masters = []
        for layout in self._layouts:
            slices = [
                (param, own.offset, own.offset + own.stop - own.start)
                for param in layout.params
                for own in layout.own_slices(param, self._is_stock)
            ]
            slices.sort(key=lambda each: each[1])
            masters.append(MasterWeights(zero12.master(self._optimizer, layout.group_index), slices))
        return masters

    def check(self) -> None:
        """After a step: can the states be brought into DeepSpeed's layout?

        Raises:
            RuntimeError: some are neither one value for each element nor one for all.
        """
        if self._is_checked:
            return
        optimizer = self._stepping()
        for layout in (layout for layout in self._layouts if not layout.stripes.is_stock):
            master = zero12.master(self._optimizer, layout.group_index)
            for name, value in optimizer.state.get(master, {}).items():
                self._is_checked = True
                if isinstance(value, torch.Tensor) and value.shape != master.shape and value.numel() > 1:
                    raise RuntimeError(
                        f"step() found that the optimizer {type(optimizer).__name__} keeps a state {name!r} of shape"
                        f" {tuple(value.shape)} for {master.numel()} elements. On stages 1 and 2, states must have one"
                        " value for each element, or one for all. Use AdamW, SGD or another such optimizer, or stage 3."
                    )

    # ---- helpers -------------------------------------------------------------------------------------------------

    def _move(self, to_stock: bool) -> None:
        if self._is_stock == to_stock:
            return
        for layout in self._layouts:
            if layout.stripes.is_stock:
                continue
            flat = zero12.flat_parameters(self._optimizer, layout.group_index)
            master = zero12.master(self._optimizer, layout.group_index)
            if master.dtype == flat.dtype:  # they are the same
                for own in layout.stripes.own(to_stock):
                    master.data[own.offset : own.offset + own.stop - own.start].copy_(flat[own.start : own.stop])
            else:
                self._exchange(master.data, layout, to_stock, flat.device)
            for value in self._stepping().state.get(master, {}).values():
                if isinstance(value, torch.Tensor) and value.shape == master.shape:
                    self._exchange(value, layout, to_stock, flat.device)
        self._is_stock = to_stock

    def _exchange(self, shard: torch.Tensor, layout: FlatLayout, to_stock: bool, device: torch.device) -> None:
        shard.copy_(layout.stripes.exchange(shard, not to_stock, layout.process_group, device))

    def _layout_of(self, param: Any) -> FlatLayout:
        return next(layout for layout in self._layouts if param in layout.offsets)

    def _shard(self, layout: FlatLayout, key: str | None) -> torch.Tensor:
        master = zero12.master(self._optimizer, layout.group_index)
        if key is None:
            data: torch.Tensor = master.data
            return data
        value = self._stepping().state.get(master, {}).get(key)
        if not isinstance(value, torch.Tensor) or value.shape != master.shape:
            raise ValueError(f"{key!r} is no state of the optimizer's elements.")
        return value


def full_from(shard: torch.Tensor, layout: FlatLayout, slices: Sequence[OwnSlice], param: Any) -> torch.Tensor:
    """Return ``param``'s elements of all ranks' shards, in its shape and in fp32. Collective."""
    from deepspeed import comm

    full = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
    for own in slices:
        full[own.start : own.stop].copy_(shard[own.offset : own.offset + own.stop - own.start])
    comm.all_reduce(full, group=layout.process_group)
    return full.view(param.shape)


def into_shard(value: torch.Tensor, shard: torch.Tensor, slices: Sequence[OwnSlice]) -> None:
    """Copy this rank's part of ``value`` into its shard."""
    flat = value.detach().reshape(-1)
    for own in slices:
        shard[own.offset : own.offset + own.stop - own.start].copy_(flat[own.start : own.stop])
