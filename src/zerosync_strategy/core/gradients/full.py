"""Averaged gradients in full on the parameters, between the reduction and the step, for a program to see and change.

The shards of all ranks are gathered. What the program changes goes back into the shards: each rank takes its own part.
Unchanged elements stay as they are in the shard, which may be of a wider dtype than the parameters.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import all_gather_rows
from zerosync_strategy.core.engine import zero, zero3
from zerosync_strategy.core.gradients.layout import ShardLayout
from zerosync_strategy.core.gradients.reducer import Reducer


@torch.no_grad()
def show_gradients(reducer: Reducer) -> None:
    """Give every parameter its averaged gradient, without the loss scale. A collective call after ``close``."""
    scale = zero.loss_scale(reducer.optimizer)
    for layout in reducer.layouts:
        rows = _gather_shards(reducer, layout, scale)
        for param in layout.params:
            gradient = layout.gradient_in(rows, param).view(zero3.full_shape(param))
            with zero3.in_full_shape(param):
                param.grad = gradient.clone()  # the program may keep it


def _gather_shards(reducer: Reducer, layout: ShardLayout, scale: float) -> torch.Tensor:
    """Return all ranks' shards of one layout, by rank, without the loss scale."""
    first = layout.params[0]
    rows = torch.empty(layout.world_size, layout.shard_numel, dtype=first.dtype, device=first.device)
    own = rows[dist.get_rank(layout.process_group)]
    offset = 0
    for shard in reducer.shard_parts(layout, 0, layout.shard_numel):
        own.narrow(0, offset, shard.numel()).copy_(_unscaled(shard, scale, first.dtype))
        offset += shard.numel()
    all_gather_rows(rows, layout.process_group)
    return rows


@torch.no_grad()
def take_gradients_back(reducer: Reducer) -> None:
    """Take this rank's part of the shown gradients into its shards, zeros for one that was removed. Sends nothing."""
    scale = zero.loss_scale(reducer.optimizer)
    for layout in reducer.layouts:
        for param in layout.params:
            own = layout.own_slice(param)
            if own.start == own.stop:
                continue
            (target,) = reducer.shard_parts(layout, own.offset, own.stop - own.start)
            gradient = param.grad
            if gradient is None:
                target.zero_()
                continue
            part = gradient.reshape(-1)[own.start : own.stop].to(target.device)
            scaled = part if scale == 1 else part.float() * scale
            unchanged = part == _unscaled(target, scale, part.dtype)
            target.copy_(torch.where(unchanged, target, scaled.to(target.dtype)))
    reducer.hand_over()
    reducer.norm = None


def hide_gradients(reducer: Reducer) -> None:
    """Remove the shown gradients: from here on those in the shards count."""
    for param in reducer.params:
        param.grad = None


def _unscaled(shard: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    return (shard if scale == 1 else shard.float() / scale).to(dtype)
