"""How ZeRO-1/2 and ZeRO-3 lay out their partitions, and where DeepSpeed's step looks for the gradients in them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core import contract
from zerosync_strategy.core.collectives import all_gather
from zerosync_strategy.core.partition import Partition, cut_each, cut_flat
from zerosync_strategy.core.reduction import Reducer, param_size, share


class Stage12Reducer(Reducer):
    """ZeRO-1 and ZeRO-2: each group's parameters lie in one flat buffer, cut into equal partitions."""

    def _read_partitions(self) -> list[Partition]:
        optimizer = self.optimizer
        divisor = dist.get_world_size(optimizer.dp_process_group) / float(optimizer.sequence_parallel_size)
        partitions = []
        for index, flat in enumerate(optimizer.bit16_groups_flat):
            group = optimizer.real_dp_process_group[index]
            params = [param for param in optimizer.bit16_groups[index] if param.numel()]
            offsets = [(param.data_ptr() - flat.data_ptr()) // flat.element_size() for param in params]
            for param, offset in zip(params, offsets, strict=True):
                if not 0 <= offset <= flat.numel() - param.numel():
                    raise contract.changed("reduction", "the parameters do not lie in optimizer.bit16_groups_flat")
            columns, world_size = int(optimizer.partition_size[index]), dist.get_world_size(group)
            pieces = cut_flat(params, offsets, columns, world_size)
            averaged = divisor if optimizer.gradient_average else 1.0
            dtype = optimizer.communication_data_type
            partitions.append(Partition(group, params, columns, pieces, averaged, dtype, index))
        return partitions

    def _open_partitions(self) -> None:
        optimizer = self.optimizer
        for partition in self.partitions:
            index = partition.group
            optimizer.averaged_gradients[index] = optimizer._build_compact_grad_partition_buffer(index)

    def _destinations(self, partition: Partition) -> list[tuple[int, torch.Tensor]]:
        return [(0, self.optimizer.averaged_gradients[partition.group].flat_partition)]

    def _hand_over(self) -> None:
        optimizer = self.optimizer
        if not optimizer.cpu_offload:
            return
        for index, params in enumerate(optimizer.params_in_partition):
            averaged = optimizer.averaged_gradients[index].flat_partition
            optimizer.single_partition_of_fp32_groups[index].grad.copy_(averaged)
            for param in params:
                key = optimizer.get_param_id(param)
                _, _, column, count = optimizer.grad_position[key]
                part = averaged.narrow(0, int(column), int(count))
                optimizer.norm_for_param_grads[key] = part.double().norm(2)
                optimizer.update_offload_overflow_tracker(part)

    def compute_norm(self) -> torch.Tensor:
        return self.optimizer.scaled_global_norm()

    def _discard(self) -> None:
        for partition in self.partitions:
            self.optimizer.averaged_gradients[partition.group] = None

    def parameters_floor(self) -> dict[Any, int]:
        return {q: share(q.numel() * q.element_size(), len(p.pieces)) for p in self.partitions for q in p.params}


def gather_parameters(*, partitioned_param_groups: Any, dp_process_group: Any, **_: Any) -> None:
    """Give the updated parameters of ZeRO-1/2 to all ranks, from where they lie to where they go."""
    for parts, process_group in zip(partitioned_param_groups, dp_process_group, strict=True):
        all_gather(parts, process_group).wait()


class Stage3Reducer(Reducer):
    """ZeRO-3: each parameter is cut by itself; its data may be released while its gradient is there in full."""

    def _read_partitions(self) -> list[Partition]:
        optimizer = self.optimizer
        by_group: dict[Any, list[Any]] = {}
        for param in (param for group in optimizer.fp16_groups for param in group):
            by_group.setdefault(optimizer._get_param_partition_group(param), []).append(param)
        partitions = []
        for process_group, params in by_group.items():
            world_size = dist.get_world_size(process_group)
            shares = [param.partition_numel() for param in params]
            pieces = cut_each(params, [param.ds_numel for param in params], shares, world_size)
            # The loss is the mean over all data-parallel ranks; so is its gradient, however few share a parameter.
            ranks = max(world_size, dist.get_world_size(optimizer.dp_process_group))
            divisor = optimizer._gradient_averaging_world_size(params, ranks)
            dtype = optimizer.communication_data_type
            partitions.append(Partition(process_group, params, sum(shares), pieces, float(divisor), dtype))
        return partitions

    def _open_partitions(self) -> None:
        kept = contract.stage_3_gradient_partitions(self.optimizer)
        for param in self.params:
            kept[param.ds_id].zero_()

    def _destinations(self, partition: Partition) -> list[tuple[int, torch.Tensor]]:
        kept, column, destinations = contract.stage_3_gradient_partitions(self.optimizer), 0, []
        for param in partition.params:
            destinations.append((column, kept[param.ds_id]))
            column += kept[param.ds_id].numel()
        return destinations

    def _hand_over(self) -> None:
        optimizer = self.optimizer
        if optimizer.offload_optimizer:
            optimizer._offload_boundary_param_ids = {param.ds_id for param in self.params}
            optimizer.zerosync_stock_finalize()
            return
        kept = contract.stage_3_gradient_partitions(optimizer)
        for index, group in enumerate(optimizer.fp16_groups):
            optimizer.averaged_gradients[index] = [kept[param.ds_id] for param in group]

    def compute_norm(self) -> torch.Tensor:
        (norm,) = self.optimizer._get_norm_groups()
        return norm

    @property
    def over_groups(self) -> bool:
        """Whether some parameters are sharded over fewer ranks than all; the same on every rank."""
        everyone = dist.get_world_size(self.optimizer.dp_process_group)
        return any(len(partition.pieces) < everyone for partition in self.partitions)

    def combine_norms(self, norms: list[Any]) -> torch.Tensor:
        """The norm of all gradients, the same on every rank (U3), from DeepSpeed's by group of parameters.

        A group's norm is summed over the ranks that shard it. Parameters of another group of ranks are others, so each
        of its ranks adds its share of the square, and each element counts once. A collective call.
        """
        from deepspeed import comm

        optimizer = self.optimizer
        stacked = torch.stack([torch.as_tensor(norm) for norm in norms])
        # DeepSpeed marks the norm of a group with an infinity or a NaN by -1.
        stacked = torch.where(stacked >= 0, stacked, torch.inf)
        if not self.over_groups:
            return stacked.norm()
        squares = stacked.double().square().to(self.params[0].device)  # offloaded, they are on the host
        for index, group in enumerate(optimizer.fp16_groups):
            world_size = dist.get_world_size(optimizer._get_param_partition_group(group[0]))
            squares[index] /= optimizer._gradient_averaging_world_size(group, world_size)
        total = squares.sum()
        comm.all_reduce(total, group=optimizer.dp_process_group)
        return total.sqrt().to(stacked)

    def _discard(self) -> None:
        self.optimizer.averaged_gradients = {}

    def parameters_floor(self) -> dict[Any, int]:
        floor = {}
        for param in self.optimizer.module.parameters():
            world_size = dist.get_world_size(self.optimizer._get_param_partition_group(param))
            floor[param] = share(param_size(param) * param.element_size(), world_size)
        return floor
