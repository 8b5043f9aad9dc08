"""Averaged gradients in full on the parameters, between the reduction and the step, for a program to see and change.

The shards of all ranks are gathered. What the program changes goes back into the shards: each rank takes its own part.
Unchanged elements stay as they are in the shard, which may be of a wider dtype than the parameters.
"""

from __future__ import annotations

from bisect import bisect_right

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
        gradients = {param: rows.new_empty(zero3.full_shape(param)) for param in layout.params}
        for row, slices in zip(rows, layout.slices, strict=True):
            for piece in slices:
                part = row.narrow(0, piece.offset, piece.size)
                gradients[piece.param].view(-1).narrow(0, piece.start, piece.size).copy_(part)
        for param, gradient in gradients.items():
            with zero3.in_full_shape(param):
                param.grad = gradient.to(param.dtype)


def _gather_shards(reducer: Reducer, layout: ShardLayout, scale: float) -> torch.Tensor:
    """Return all ranks' shards of one layout, by rank, without the loss scale."""
    first = layout.params[0]
    rows = torch.zeros(layout.world_size, layout.shard_numel, dtype=first.dtype, device=first.device)
    own = rows[dist.get_rank(layout.process_group)]
    for offset, shard in reducer.shard_tensors(layout):
        own.narrow(0, offset, shard.numel()).copy_(_unscaled(shard, scale, first.dtype))
    all_gather_rows(rows, layout.process_group)
    return rows


@torch.no_grad()
def take_gradients_back(reducer: Reducer) -> None:
    """Take this rank's part of the shown gradients into its shards, zeros for one that was removed. Sends nothing."""
    scale = zero.loss_scale(reducer.optimizer)
    for layout in reducer.layouts:
        shards = reducer.shard_tensors(layout)
        begins = [begin for begin, _ in shards]
        for piece in layout.slices[dist.get_rank(layout.process_group)]:
            begin, shard = shards[bisect_right(begins, piece.offset) - 1]
            target, gradient = shard.narrow(0, piece.offset - begin, piece.size), piece.param.grad
            if gradient is None:
                target.zero_()
                continue
            part = gradient.reshape(-1).narrow(0, piece.start, piece.size).to(target.device)
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
