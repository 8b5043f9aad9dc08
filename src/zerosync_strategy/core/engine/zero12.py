"""ZeRO-1 and ZeRO-2: where the optimizer keeps gradients, and how its step gathers parameters.

Each parameter group lies in one flat buffer, which is cut into equal shards, one per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.engine import contract
from zerosync_strategy.core.engine.zero import MasterWeights


@dataclass(frozen=True)
class FlatGroup:
    """One parameter group of the optimizer.

    Attributes:
        index: among the groups.
        process_group: whose ranks each have one shard.
        params: those that have elements.
        offsets: of each parameter in the flat buffer, in elements.
        shapes: of each parameter.
        shard_numel: elements of one shard, padding included.
    """

    index: int
    process_group: Any
    params: list[Any]
    offsets: list[int]
    shapes: list[tuple[int, ...]]
    shard_numel: int


def flat_groups(optimizer: Any) -> list[FlatGroup]:
    """Return the parameter groups of ``optimizer``.

    Raises:
        ContractError: the parameters do not lie in the flat buffers.
    """
    groups = []
    for index, flat in enumerate(optimizer.bit16_groups_flat):
        params = [param for param in optimizer.bit16_groups[index] if param.numel()]
        offsets = [(param.data_ptr() - flat.data_ptr()) // flat.element_size() for param in params]
        for param, offset in zip(params, offsets, strict=True):
            if not 0 <= offset <= flat.numel() - param.numel():
                raise contract.changed("reduction", "the parameters do not lie in optimizer.bit16_groups_flat")
        shard_numel = int(optimizer.partition_size[index])
        shapes = [tuple(param.shape) for param in params]
        groups.append(FlatGroup(index, optimizer.real_dp_process_group[index], params, offsets, shapes, shard_numel))
    return groups


def leave_graphs(optimizer: Any) -> None:
    """Take the flat parameters out of the graph by which DeepSpeed 0.18.7 to 0.18.9 makes them of the model's own.

    In it, torch refuses to gather into them. They stay where they lie.
    """
    shards, flats = optimizer.parallel_partitioned_bit16_groups, optimizer.bit16_groups_flat
    for index, flat in enumerate(flats):
        if flat.requires_grad:
            flats[index], shards[index] = flat.detach(), [shard.detach() for shard in shards[index]]


def averaging_divisor(optimizer: Any) -> float:
    """Return what a sum of gradients over the data-parallel ranks is divided by.

    The ranks of one sequence count each, as in ZeRO-3 and plain data parallelism: every rank's loss is that of the
    sequence, or of its own tokens. DeepSpeed's ZeRO-1 and 2 count the sequences; their gradients are a multiple.
    """
    averages = optimizer.gradient_average if contract.has(contract.AVERAGES) else True
    return float(dist.get_world_size(optimizer.dp_process_group)) if averages else 1.0


class _GradientShard(list[torch.Tensor]):
    """A gradient shard as releases without ``COMPACT_SHARD`` take it: by parameter, and the padding.

    Here these are views of one flat tensor, as in later releases, of zeros.
    """

    def __init__(self, optimizer: Any, index: int) -> None:
        numel = int(optimizer.partition_size[index])
        dtype, device = optimizer.gradient_accumulation_dtype, optimizer.bit16_groups_flat[index].device
        self.flat_partition = torch.zeros(numel, dtype=dtype, device=device)
        begin, before = 0, int(optimizer.first_offset[index])  # elements of the first parameter in earlier shards
        for param in optimizer.params_in_partition[index]:
            part = self.flat_partition.narrow(0, begin, min(param.numel() - before, numel - begin))
            begin, before = begin + part.numel(), 0
            self.append(part.view(param.shape) if part.numel() == param.numel() else part)
        if begin < numel:
            self.append(self.flat_partition.narrow(0, begin, numel - begin))


def allocate_gradient_shard(optimizer: Any, index: int) -> None:
    """Give the optimizer a new gradient shard of zeros for one group."""
    compact = contract.has(contract.COMPACT_SHARD)
    optimizer.averaged_gradients[index] = (
        optimizer._build_compact_grad_partition_buffer(index) if compact else _GradientShard(optimizer, index)
    )


def gradient_shard(optimizer: Any, index: int) -> torch.Tensor:
    """Return this rank's gradient shard of one group, flat."""
    flat: torch.Tensor = optimizer.averaged_gradients[index].flat_partition
    return flat


def discard_gradient_shard(optimizer: Any, index: int) -> None:
    """Let the optimizer forget its gradient shard of one group."""
    optimizer.averaged_gradients[index] = None


def hand_over_gradients(optimizer: Any) -> None:
    """Let the coming step find the gradient shards. An offloaded optimizer wants copies, their norms and overflow."""
    if not optimizer.cpu_offload:
        return
    for index, params in enumerate(optimizer.params_in_partition):
        shard = gradient_shard(optimizer, index)
        optimizer.single_partition_of_fp32_groups[index].grad.copy_(shard)
        for param in params:
            key = optimizer.get_param_id(param)
            _, _, offset, numel = optimizer.grad_position[key]
            part = shard.narrow(0, int(offset), int(numel))
            optimizer.norm_for_param_grads[key] = part.double().norm(2)
            optimizer.update_offload_overflow_tracker(part)


def weights(optimizer: Any, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return of one group, flat: the parameters, this rank's shard of them, and the shard's master weights."""
    rank = dist.get_rank(optimizer.real_dp_process_group[index])
    shard = optimizer.parallel_partitioned_bit16_groups[index][rank]
    return optimizer.bit16_groups_flat[index], shard, optimizer.single_partition_of_fp32_groups[index].data


def master_weights(optimizer: Any, groups: Iterable[FlatGroup]) -> list[MasterWeights]:
    """Return this rank's master weights of each group, by the parameters that they are of."""
    masters = []
    for group in groups:
        first = dist.get_rank(group.process_group) * group.shard_numel
        slices = []
        for param, offset in sorted(zip(group.params, group.offsets, strict=True), key=lambda pair: pair[1]):
            begin, end = max(offset - first, 0), min(offset - first + param.numel(), group.shard_numel)
            if begin < end:
                slices.append((param, begin, end))
        masters.append(MasterWeights(optimizer.single_partition_of_fp32_groups[group.index], slices))
    return masters


def link_states_anew(optimizer: Any) -> None:
    """Let the parameters have the states that the torch optimizer has made since they were given theirs."""
    optimizer._hp_optimizer_states_linked = False


def gradient_norm(optimizer: Any) -> torch.Tensor:
    """Return the L2 norm of the gradients in all ranks' shards, times the loss scale. Collective."""
    norm: torch.Tensor = optimizer.scaled_global_norm()
    return norm


@contextmanager
def parameter_gather(gather: Callable[..., None]) -> Iterator[None]:
    """While active, the optimizer's step gives the updated parameters to all ranks by ``gather``.

    It is called with DeepSpeed's keywords, of which ``partitioned_param_groups`` (by group, one shard per rank) and
    ``dp_process_group`` (by group) say everything.
    """
    from deepspeed.runtime.zero import stage_1_and_2

    stock = stage_1_and_2.all_gather_dp_groups
    stage_1_and_2.all_gather_dp_groups = gather
    try:
        yield
    finally:
        stage_1_and_2.all_gather_dp_groups = stock
