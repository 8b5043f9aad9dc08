"""Averaged gradients in full on the parameters, between the reduction and the step, for a program to see and change.

The shards of all ranks are gathered. What the program changes goes back into the shards: each rank takes its own part.
Unchanged elements stay as they are in the shard, which may be of a wider dtype than the parameters.
"""

from __future__ import annotations

import torch

from zerosync_strategy.core.comm.collectives import all_gather_rows
from zerosync_strategy.core.comm.stripes import OwnSlice
from zerosync_strategy.core.engine import zero, zero3
from zerosync_strategy.core.gradients.layout import ShardLayout
from zerosync_strategy.core.gradients.reducer import Reducer


@torch.no_grad()
def show_gradients(reducer: Reducer) -> None:
    """Give every parameter its averaged gradient, without the loss scale. A collective call after ``close``."""
    scale = zero.loss_scale(reducer.optimizer)
    for layout in reducer.layouts:
        memory = _gather_shards(reducer, layout, scale)
        for param in layout.params:
            gradient = layout.gradient_in(memory, param).view(zero3.full_shape(param))
            with zero3.in_full_shape(param):
                param.grad = gradient.clone()  # the program may keep it


def _gather_shards(reducer: Reducer, layout: ShardLayout, scale: float) -> torch.Tensor:
    """Return all ranks' shards of one layout, flat, without the loss scale."""
    first = layout.params[0]
    memory = torch.empty(layout.world_size * layout.shard_numel, dtype=first.dtype, device=first.device)
    for rows, offset in layout.matrices(memory):
        own, done = rows[layout.rank], 0
        for shard in reducer.shard_parts(layout, offset, len(own)):
            own.narrow(0, done, shard.numel()).copy_(_unscaled(shard, scale, first.dtype))
            done += shard.numel()
        all_gather_rows(rows, layout.process_group).wait()
    return memory


@torch.no_grad()
def take_gradients_back(reducer: Reducer) -> None:
    """Take this rank's part of the shown gradients into its shards, zeros for one that was removed. Sends nothing."""
    scale = zero.loss_scale(reducer.optimizer)
    for layout in reducer.layouts:
        for param in layout.params:
            for own in layout.own_slices(param):
                if own.start < own.stop:
                    _take_back(reducer, layout, param.grad, own, scale)
    reducer.hand_over()
    reducer.norm = None


def _take_back(
    reducer: Reducer, layout: ShardLayout, gradient: torch.Tensor | None, own: OwnSlice, scale: float
) -> None:
    (target,) = reducer.shard_parts(layout, own.offset, own.stop - own.start)
    if gradient is None:
        target.zero_()
        return
    part = gradient.reshape(-1)[own.start : own.stop].to(target.device)
    scaled = part if scale == 1 else part.float() * scale
    unchanged = part == _unscaled(target, scale, part.dtype)
    target.copy_(torch.where(unchanged, target, scaled.to(target.dtype)))


def hide_gradients(reducer: Reducer) -> None:
    """Remove the shown gradients: from here on those in the shards count."""
    for param in reducer.params:
        param.grad = None


def _unscaled(shard: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    return (shard if scale == 1 else shard.float() / scale).to(dtype)
