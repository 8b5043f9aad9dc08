"""Parameters that a program changes outside of the optimizer: the coming step starts from what it finds in them (N1).

ZeRO steps weights of its own, the *master weights* of this rank's shard, and then overwrites the parameters with them.
So a clamp in a hook or a ``load_state_dict`` would last until the next step. Before each step, a rank compares its
shard of the parameters with the master weights, as the last step has written them there, and adopts what differs. An
edit must be made alike on all ranks, as in plain data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from zerosync_strategy.core.comm.stripes import OwnSlice
from zerosync_strategy.core.engine import zero3, zero3_optimizer, zero12


@torch.no_grad()
def adopt_edits_of_stage_1_2(
    optimizer: Any,
    groups: Iterable[tuple[zero12.FlatGroup, Sequence[OwnSlice]]],
    names: Mapping[Any, str],
    concurrent: bool,
) -> None:
    """Adopt edits into the master weights of ZeRO-1 or ZeRO-2. All parameters lie in the flat buffers afterwards.

    Args:
        groups: of the optimizer, each with the elements that this rank has of it.
        names: of the parameters, for errors.
        concurrent: the device runs beside the host, which must not wait for it.

    Raises:
        ValueError: a parameter was given data of another shape.
    """
    for group, slices in groups:
        flat, master = zero12.flat_parameters(optimizer, group.index), zero12.master(optimizer, group.index).data
        begin, itemsize = flat.data_ptr(), flat.element_size()
        for param, offset, shape in zip(group.params, group.offsets, group.shapes, strict=True):
            if param.data_ptr() != begin + offset * itemsize or param.shape != shape:  # param.data = ...
                _check_shape(param, shape, names)
                place = flat.narrow(0, offset, param.numel()).view(shape)
                param.data = place.copy_(param.data)
        for own in slices:
            part = master.narrow(0, own.offset, own.stop - own.start)
            _adopt(flat[own.start : own.stop], part, concurrent)


@torch.no_grad()
def adopt_edits_of_stage_3(optimizer: Any, params: Iterable[Any], names: Mapping[Any, str], concurrent: bool) -> None:
    """Adopt edits into the shards and the master weights of ZeRO-3.

    Args:
        params: of the optimizer; those that are gathered may have been edited in full, the others in their shards.
        names: of the parameters, for errors.
        concurrent: the device runs beside the host, which must not wait for it.

    Raises:
        ValueError: a parameter was given data of another shape, or any while it was not gathered.
    """
    gathered = []
    for param in params:
        if zero3.is_gathered(param):
            _check_shape(param, zero3.full_shape(param), names)
            gathered.append(param)
        elif param.numel() > 0 and zero3.is_released(param):  # one in flight has its memory already
            raise ValueError(
                f"Parameter {names.get(param, 'of the optimizer')!r} was given new data while ZeRO-3 had it sharded,"
                " where it would be lost. Change it inside 'with zerosync.full_parameters():', with the handle that"
                " attach() returned (in Lightning, trainer.strategy.zerosync)."
            )
    pairs = [pair for param in gathered if (pair := zero3.own_part(param)) is not None]
    if pairs:
        torch._foreach_copy_([shard for shard, _ in pairs], [part for _, part in pairs])
    for shard, master in zero3_optimizer.weights(optimizer):
        _adopt(shard, master, concurrent)


def _adopt(shard: torch.Tensor, master: torch.Tensor, concurrent: bool) -> None:
    """Copy to ``master`` where ``shard`` is not what ``master`` becomes in its dtype."""
    if shard.dtype == master.dtype:
        master.copy_(shard)
        return
    shard = shard.to(master.device)
    written = master.to(shard.dtype)
    if concurrent or not torch.equal(shard, written):  # on the host, a look is cheaper than a copy
        master.copy_(torch.where(shard == written, master, shard.to(master.dtype)))


def _check_shape(param: Any, shape: tuple[int, ...], names: Mapping[Any, str]) -> None:
    if tuple(param.shape) != shape:
        raise ValueError(
            f"Parameter {names.get(param, 'of the optimizer')!r} has the shape {tuple(param.shape)}, where the engine"
            f" was built with {shape}: its data was replaced. ZeRO cannot change shapes. Build the optimizer and the"
            " engine anew."
        )
