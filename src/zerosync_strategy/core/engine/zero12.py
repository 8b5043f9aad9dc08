"""ZeRO-1 and ZeRO-2: where the optimizer keeps gradients, and how its step gathers parameters.

Each parameter group lies in one flat buffer, which is divided into equal shards, one per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerosync_strategy.core.engine import contract, deepspeed_internals
from zerosync_strategy.core.engine.patches import replaced
from zerosync_strategy.core.engine.types import Zero12Optimizer
from zerosync_strategy.core.engine.zero import sum_of_squares


@dataclass(frozen=True)
class FlatGroup:
    """One parameter group of the optimizer: its parameters that have elements, with their offsets in the flat buffer.

    Each rank of ``process_group`` has one shard, of ``shard_numel`` elements, padding included.
    """

    index: int
    process_group: dist.ProcessGroup
    params: list[nn.Parameter]
    offsets: list[int]
    shapes: list[tuple[int, ...]]
    shard_numel: int


def flat_groups(optimizer: Zero12Optimizer) -> list[FlatGroup]:
    """Return the parameter groups; raise ``ContractError`` if the parameters do not lie in the flat buffers."""
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


def leave_graphs(optimizer: Zero12Optimizer) -> None:
    """Detach the flat buffers from the graph in which DeepSpeed 0.18.7 to 0.18.9 makes them.

    In that graph, torch refuses to gather into them. Their memory stays the same.
    """
    shards, flats = optimizer.parallel_partitioned_bit16_groups, optimizer.bit16_groups_flat
    for index, flat in enumerate(flats):
        if flat.requires_grad:
            flats[index], shards[index] = flat.detach(), [shard.detach() for shard in shards[index]]


def averaging_divisor(optimizer: Zero12Optimizer) -> float:
    """Return the divisor for a sum of gradients over the data-parallel ranks.

    Each rank of a sequence counts, as in ZeRO-3 and plain data parallelism, because every rank's loss is that of the
    sequence, or of its own tokens. DeepSpeed's ZeRO-1 and 2 count sequences, so their gradients are a multiple.
    """
    averages = optimizer.gradient_average if contract.has(deepspeed_internals.AVERAGES) else True
    return float(dist.get_world_size(optimizer.dp_process_group)) if averages else 1.0


class _GradientShard(list[torch.Tensor]):
    """A gradient shard in the form of DeepSpeed's step: the parts, here one, of one flat tensor."""

    def __init__(self, flat: torch.Tensor) -> None:
        super().__init__([flat])
        self.flat_partition = flat


def give_gradient_shard(optimizer: Zero12Optimizer, index: int, flat: torch.Tensor | None) -> None:
    """Set this rank's gradient shard of one group to ``flat``, with any values; ``None``: no shard."""
    optimizer.averaged_gradients[index] = None if flat is None else _GradientShard(flat)


def gradient_shard(optimizer: Zero12Optimizer, index: int) -> torch.Tensor:
    return optimizer.averaged_gradients[index].flat_partition


def hand_over_gradients(optimizer: Zero12Optimizer) -> None:
    """Give the gradient shards to the next step. For an offloaded optimizer, begin to copy them to the host."""
    if not optimizer.cpu_offload:
        return
    for index, master in enumerate(optimizer.single_partition_of_fp32_groups):
        master.grad.copy_(gradient_shard(optimizer, index), non_blocking=True)


def flat_parameters(optimizer: Zero12Optimizer, index: int) -> torch.Tensor:
    return optimizer.bit16_groups_flat[index]


def master(optimizer: Zero12Optimizer, index: int) -> Any:
    """Return the master weights of this rank's shard of one group, flat, which the torch optimizer steps."""
    return optimizer.single_partition_of_fp32_groups[index]


def params_in_order(optimizer: Zero12Optimizer, index: int) -> list[nn.Parameter]:
    """Return the parameters of one group in the order in which the program gave them to its optimizer."""
    return list(optimizer.bit16_groups[index])


def give_own_master(optimizer: Zero12Optimizer, index: int, numel: int) -> torch.Tensor:
    """Make this rank's shard of a group have ``numel`` elements, any number; return it, flat and uninitialised.

    DeepSpeed's own shard, and the mapping of parameters to it, are dropped.
    """
    before = master(optimizer, index)
    flat = torch.empty(numel, dtype=before.dtype, device=before.device, requires_grad=True)
    optimizer.single_partition_of_fp32_groups[index] = flat
    optimizer.partition_size[index] = numel
    for param in optimizer.bit16_groups[index]:
        param._hp_mapping = None
    return flat


def masters_replaced(optimizer: Zero12Optimizer, masters: list[torch.Tensor]) -> AbstractContextManager[None]:
    """While active, DeepSpeed uses ``masters`` in place of the master weights that this rank steps, by group."""
    return replaced(optimizer, "single_partition_of_fp32_groups", masters)


def stepped_shard(optimizer: Zero12Optimizer, index: int) -> torch.Tensor:
    """Return this rank's shard of one group as the step has left it; in pinned memory if offloaded."""
    if optimizer.cpu_offload:
        return optimizer.param_buffer_of_bit16_for_cpu_offload_groups[index].data
    return master(optimizer, index).data


def changed_shard(optimizer: Zero12Optimizer, index: int) -> torch.Tensor:
    """Return the same as :func:`stepped_shard`, after something other than a step has changed the master weights."""
    shard = stepped_shard(optimizer, index)
    if not optimizer.cpu_offload:
        return shard
    # A copy that is not pinned, because the device may still read the pinned buffer.
    return master(optimizer, index).data.to(shard.dtype, copy=True)


def relink_states(optimizer: Zero12Optimizer) -> None:
    """Make parameters refer to states that the torch optimizer has made since the last linking."""
    optimizer._hp_optimizer_states_linked = False


def counted_in_norm(optimizer: Zero12Optimizer, params: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
    """Return the ``params`` that this rank counts in a norm. The first tensor-parallel rank counts replicated ones.

    Parameters that are divided over tensor-parallel ranks have one of Megatron's marks.
    """
    if optimizer.model_parallel_rank == 0:
        return params
    marks = ("model_parallel", "tensor_model_parallel")
    return [param for param in params if any(getattr(param, mark, False) for mark in marks)]


def norm_of_shards(
    optimizer: Zero12Optimizer, shards: Iterable[Sequence[torch.Tensor]], said: torch.Tensor,
    sum_over_ranks: Callable[[torch.Tensor], None],
) -> torch.Tensor:  # fmt: skip
    """Return the L2 norm of all ranks' gradients, times the loss scale; infinity if it is not finite. Collective.

    ``shards``: by group, the parts of this rank's gradient shard that it counts. The sums of ``said`` over the
    data-parallel ranks, over which ``sum_over_ranks`` sums a tensor in place, follow the norm, all in fp64.
    """
    from deepspeed import comm

    squares = [sum_of_squares(parts) for parts in shards]
    summed = torch.cat([torch.stack(squares), said.to(squares[0].device)])
    sum_over_ranks(summed)
    squares, said = summed.split([len(squares), len(said)])
    optimizer._model_parallel_all_reduce(squares, comm.ReduceOp.SUM)
    by_group = list(squares.sqrt().float())
    if optimizer.has_moe_layers:
        optimizer._average_expert_grad_norms(by_group)
    norm = torch.stack(by_group).norm()
    return torch.cat([torch.where(norm.isfinite(), norm, torch.inf).double().view(1), said])


class _Elsewhere:
    """Replaces the shards of the parameters, to which DeepSpeed's step copies the stepped ones: copies nothing."""

    @property
    def data(self) -> _Elsewhere:
        return self

    def __getitem__(self, _: int) -> _Elsewhere:
        return self

    def copy_(self, *_: object, **__: object) -> None:
        pass


@contextmanager
def parameter_gather(optimizer: Zero12Optimizer, gather: Callable[[], None]) -> Iterator[None]:
    """While active, the step of ``optimizer`` gives the updated parameters to all ranks by ``gather`` alone.

    The parameters must lie in the flat buffers; DeepSpeed's step would make each a view of its part again.
    """
    from deepspeed.runtime.zero import stage_1_and_2

    with (
        replaced(stage_1_and_2, "all_gather_dp_groups", lambda **_: gather()),
        replaced(optimizer, "parallel_partitioned_bit16_groups", _Elsewhere()),
        replaced(optimizer, "_update_model_bit16_weights", lambda _: None),
    ):
        yield
