"""The optimizer of ZeRO-3: its groups, gradient shards, norm and master weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from zerosync_strategy.core.engine import contract, deepspeed_internals, zero3
from zerosync_strategy.core.engine.parameter import record_of
from zerosync_strategy.core.engine.types import Zero3Optimizer, Zero3Parameter
from zerosync_strategy.core.engine.zero import MasterShard, offloads, step_torch_optimizer, sum_of_squares


def param_groups(optimizer: Zero3Optimizer) -> list[list[nn.Parameter]]:
    """Return the parameters of the optimizer, by DeepSpeed's groups."""
    return optimizer.fp16_groups


def gradient_group(optimizer: Zero3Optimizer, param: nn.Parameter) -> dist.ProcessGroup:
    """Return the process group whose ranks each have a shard of the gradient of ``param``."""
    if not contract.has(deepspeed_internals.PARAM_GROUP):
        return optimizer.dp_process_group
    return optimizer._get_param_partition_group(param)


def averaging_divisor(optimizer: Zero3Optimizer, params: Sequence[nn.Parameter], world_size: int) -> float:
    """Return the divisor for a sum of the gradients of ``params`` over ``world_size`` ranks."""
    if not contract.has(deepspeed_internals.AVERAGED_RANKS):
        return float(world_size)
    return float(optimizer._gradient_averaging_world_size(params, world_size))


def gradient_shards(optimizer: Zero3Optimizer) -> dict[int, torch.Tensor]:
    """Return this rank's shard of each gradient, flat, by parameter id."""
    return getattr(optimizer, deepspeed_internals.GRADIENT_SHARDS)


def hand_over_gradients(optimizer: Zero3Optimizer, params: Iterable[Zero3Parameter], joined: bool) -> None:
    """Give the gradient shards of ``params`` to the next step; if ``joined``, joined by sub-group if possible."""
    shards = gradient_shards(optimizer)
    if offloads(optimizer) and contract.has(deepspeed_internals.STEPPED_OFFLOADED):
        optimizer._offload_boundary_param_ids = {param.ds_id for param in params}
        optimizer.zerosync_stock_finalize()
        return
    if offloads(optimizer):
        for param in params:
            key, shard = optimizer.get_param_id(param), shards[param.ds_id]
            group, offset, _ = optimizer.grad_position[key]
            optimizer.norm_for_param_grads[key] = shard.double().norm(2)
            optimizer.fp32_partitioned_groups_flat[group].grad.narrow(0, int(offset), shard.numel()).copy_(shard)
        return
    for index, group in enumerate(optimizer.fp16_groups):
        whole = _joined_shards(optimizer, index) if joined else None
        optimizer.averaged_gradients[index] = [shards[param.ds_id] for param in group] if whole is None else [whole]


def give_gradients(optimizer: Zero3Optimizer, by_group: list[list[torch.Tensor]]) -> None:
    """Set the optimizer's own gradients of each sub-group, with any number of elements."""
    optimizer.averaged_gradients = dict(enumerate(by_group))


def _joined_shards(optimizer: Zero3Optimizer, index: int) -> torch.Tensor | None:
    """Return the gradient shards of a sub-group as one tensor, without a copy; ``None`` if they are not contiguous.

    DeepSpeed has made them, in this order, as parts of one buffer.
    """
    group, shards = optimizer.fp16_groups[index], gradient_shards(optimizer)
    first, last = shards[group[0].ds_id], shards[group[-1].ds_id]
    numel = optimizer.fp32_partitioned_groups_flat[index].numel()
    if last.data_ptr() + last.nbytes != first.data_ptr() + numel * first.element_size():
        return None
    return first.as_strided((numel,), (1,))


def scales_gradients(optimizer: Zero3Optimizer) -> bool:
    """Return whether a step multiplies its gradients, to undo the loss scale or to clip."""
    return bool(optimizer.loss_scale != 1 or optimizer.clip_grad > 0)


def step_factor(optimizer: Zero3Optimizer, norm: torch.Tensor) -> float | torch.Tensor:
    """Return the factor for gradients of this ``norm``, to undo the loss scale and to clip."""
    scale = optimizer.loss_scale
    if optimizer.clip_grad > 0:
        scale = scale * ((norm / scale + 1e-6) / optimizer.clip_grad).clamp(min=1.0)
    return 1.0 / scale


def is_model_parallel(optimizer: Zero3Optimizer) -> bool:
    """Return whether ranks with other parts of the model take part in its norm."""
    return optimizer.model_parallel_group is not None


def norm_of_shards(
    optimizer: Zero3Optimizer, said: torch.Tensor, sum_over_ranks: Callable[[torch.Tensor], None]
) -> torch.Tensor:  # fmt: skip
    """Return the norm of the gradients that were handed over; infinity if it is not finite. Collective.

    The data-parallel ranks together have each element of the model once, over whichever of them it is sharded. The sums
    of ``said`` over them follow the norm, all in fp64. ``sum_over_ranks`` sums a tensor over them in place.
    """
    shards = [shard for of_group in optimizer.averaged_gradients.values() for shard in of_group]
    summed = torch.cat([sum_of_squares(shards).view(1), said])
    sum_over_ranks(summed)
    norm = summed[:1].sqrt().float()
    return torch.cat([torch.where(norm.isfinite(), norm, torch.inf).double(), summed[1:]])


def weights(optimizer: Zero3Optimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this rank's shards of the parameters, flat, with their master weights, if both are in memory.

    In fp32, the two may be one tensor, which is left out.
    """
    pairs = zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True)
    for shard, master in pairs:
        if shard is not None and shard.numel() == master.numel() and shard.data_ptr() != master.data_ptr():
            yield shard.data, master.data


def take_master_weights(optimizer: Zero3Optimizer, param: Zero3Parameter) -> None:
    """Set this rank's shard of ``param`` to its master weights, and reshard gathered values."""
    record_of(param).write()
    param.ds_tensor.data.copy_(optimizer.get_local_fp32_param(param))
    _reshard(param)


def take_all_master_weights(optimizer: Zero3Optimizer) -> None:
    """Do so for all parameters, frozen ones included."""
    params = list(itertools.chain.from_iterable(optimizer.fp16_groups))
    for param in params:
        record_of(param).write()
    reassign_shards(optimizer)
    for param in params:
        _reshard(param)


def shards_written(params: Iterable[Zero3Parameter]) -> None:
    """Record that the shards of ``params`` were written, and reshard gathered values."""
    for param in params:
        record_of(param).write()
        _reshard(param)


def _reshard(param: Zero3Parameter) -> None:
    """Reshard ``param`` in spite of claims, without carrying changes to the shard, which is newer."""
    record = record_of(param)
    record.forget_changes()
    if zero3.is_gathered(param):
        persistent, claims = param.ds_persist, record.bits
        param.ds_persist, record.bits = False, 0
        param.partition()
        param.ds_persist, record.bits = persistent, claims
        record.settle()


def flat_master_weights(optimizer: Zero3Optimizer) -> list[torch.Tensor]:
    """Return the master weights that the optimizer steps, by sub-group."""
    return list(optimizer.fp32_partitioned_groups_flat)


@contextmanager
def masters_in_groups(optimizer: Zero3Optimizer) -> Iterator[None]:
    """While active, the groups of the torch optimizer have the master weights, as in DeepSpeed's step."""
    optimizer._set_fp32_optimizer_param_groups()
    try:
        yield
    finally:
        optimizer._clear_fp32_optimizer_param_groups()


def steps_from_disk(optimizer: Zero3Optimizer) -> bool:
    """Return whether master weights and states are on NVMe except while their sub-group is stepped."""
    return bool(getattr(optimizer, "swap_optimizer", False))


class JointStep:
    """Steps all sub-groups of the optimizer in one call of the torch optimizer, instead of one call per sub-group.

    Otherwise a class that counts its steps by group would count one step per sub-group.
    """

    def __init__(self, optimizer: Zero3Optimizer) -> None:
        self._optimizer = optimizer
        self._gradients: list[torch.Tensor | None] = []

    def ready(self, index: int) -> None:
        """Take the gradient of sub-group ``index``, which DeepSpeed has ready; with the last one, step."""
        flats = flat_master_weights(self._optimizer)
        if index == 0:
            self._gradients = []
        self._gradients.append(flats[index].grad)  # DeepSpeed removes it after each
        if index < len(flats) - 1:
            return
        for flat, gradient in zip(flats, self._gradients, strict=True):
            flat.grad = gradient
        with masters_in_groups(self._optimizer):
            step_torch_optimizer(self._optimizer)
        for flat in () if offloads(self._optimizer) else flats:
            flat.grad = None
        self._gradients = []
        reassign_shards(self._optimizer)


def master_shards(optimizer: Zero3Optimizer) -> list[MasterShard]:
    """Return this rank's master weights of each group, with the slice of each parameter, padding included.

    Raise ``ValueError`` if their states are not in memory, or if another optimizer steps some of them.
    """
    if steps_from_disk(optimizer) or hasattr(optimizer, "backup_optimizer"):
        raise ValueError(
            "The optimizer trains parameters that are frozen, while 'offload_optimizer' keeps its states on NVMe or has"
            " a 'ratio' below 1: ZeRO would step them. Leave them out of the optimizer, or keep its states in memory."
        )
    masters = []
    for flat, params in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
        ends = list(itertools.accumulate(map(zero3.shard_numel, params)))
        masters.append(MasterShard(flat, list(zip(params, [0, *ends[:-1]], ends, strict=True))))
    return masters


def torch_groups(optimizer: Zero3Optimizer) -> list[list[nn.Parameter]]:
    """Return the parameters of the optimizer, by the groups of its torch optimizer."""
    groups: list[list[nn.Parameter]] = [[] for _ in optimizer.optimizer.param_groups]
    for index, params in enumerate(optimizer.fp16_groups):
        groups[optimizer.sub_group_to_group_id[index]] += params
    return groups


def reassign_shards(optimizer: Zero3Optimizer) -> None:
    """Set the shards of the parameters to the master weights that a step has changed."""
    for index, _ in enumerate(optimizer.fp16_groups):
        optimizer._reassign_or_swap_out_partitioned_parameters(index)


def free_reduction_buffers(optimizer: Zero3Optimizer) -> Callable[[], None]:
    """Free DeepSpeed's own reduction buffers, of ``reduce_bucket_size`` elements; return a function that undoes it.

    Their memory, by default 1 GB in bf16, is returned to the device; else the allocator would keep it for the whole
    run.
    """
    from deepspeed.accelerator import get_accelerator

    freed = []
    for bucket in optimizer.ipg_buckets.values():
        if bucket.buffer is not None:
            freed.append((bucket, bucket.buffer.device, bucket.buffer.to("meta")))
            bucket.buffer = None
    if freed:
        get_accelerator().empty_cache()

    def restore() -> None:
        for bucket, device, buffer in freed:
            bucket.buffer = torch.empty_like(buffer, device=device)

    return restore


def reload_master_weights(optimizer: Zero3Optimizer) -> None:
    """Set the master weights to the present values of the parameters. Collective."""
    optimizer.refresh_fp32_params()
