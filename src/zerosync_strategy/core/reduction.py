"""Closing a window: from full local gradients to each rank's partition, every byte once.

Gradients are packed in chunks of a bounded size (R2), laid out by the rank that keeps them, and reduce-scattered
straight into the partition that DeepSpeed's step consumes; one chunk travels while the next is packed. Every parameter
of the optimizer takes part in every reduction, with zeros where this rank has no gradient: ranks may then use different
parameters (W4 needs no message), and no partition of an earlier window is stepped again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core import contract
from zerosync_strategy.core.collectives import Pending, reduce_scatter
from zerosync_strategy.core.partition import Partition, cut_each, cut_flat

CHUNK_BYTES = 32 * 2**20
"""Bytes of one packed chunk. Two exist at a time, and on backends without a reduce-scatter two more to receive."""


class Reducer(ABC):
    """Reduces the local gradients of one DeepSpeed ZeRO optimizer.

    A gradient is local (in full, on its parameter) until :meth:`reduce`, then averaged and in this rank's partition.
    Where DeepSpeed accumulates in a wider type than the parameters', so do local gradients, in ``param.grad_accum``.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.partitions = self._read_partitions()
        self.params = [param for partition in self.partitions for param in partition.params]
        self._accumulates = optimizer.gradient_accumulation_dtype != optimizer.dtype

    @abstractmethod
    def _read_partitions(self) -> list[Partition]: ...

    @abstractmethod
    def _destinations(self, partition: Partition, first: bool) -> list[tuple[int, torch.Tensor]]:
        """This rank's partition: flat tensors with the column where each begins, in order."""

    @abstractmethod
    def finalize(self) -> None:
        """The step follows: hand the partitions to DeepSpeed. Sends nothing."""

    @abstractmethod
    def discard(self) -> None:
        """Forget what the partitions hold of this window."""

    def gradient_ready(self, param: Any) -> None:
        """Autograd has added to ``param.grad``."""
        if self._accumulates and param.grad is not None:
            gradient = param.grad.to(self.optimizer.gradient_accumulation_dtype)
            param.grad_accum = gradient if _accumulated(param) is None else param.grad_accum.add_(gradient)
            param.grad = None

    def local(self, param: Any) -> torch.Tensor | None:
        """The local gradient of ``param``, in full, or ``None``."""
        return _accumulated(param) if self._accumulates else param.grad

    def drop(self) -> None:
        """Forget the local gradients."""
        for param in self.params:
            param.grad = None
            if self._accumulates:
                param.grad_accum = None  # type: ignore[attr-defined]

    def reset(self) -> None:
        """Forget everything about this window, from whatever point an exception left. No collective."""
        self.drop()
        self.discard()
        self.optimizer._backward_active_depth = 0
        self.optimizer.clear_backward_seen_flag()

    def local_bytes(self) -> int:
        """Bytes of local gradients now."""
        gradients = (self.local(param) for param in self.params)
        return sum(gradient.numel() * gradient.element_size() for gradient in gradients if gradient is not None)

    def reduction_floor(self) -> int:
        """Bytes that one rank must send to reduce every gradient once."""
        return sum(_share(p, sum(param_size(q) for q in p.params) * p.dtype.itemsize) for p in self.partitions)

    @abstractmethod
    def parameters_floor(self) -> dict[torch.nn.Parameter, int]:
        """Bytes that one rank must send to give each parameter to all ranks once."""

    @torch.no_grad()
    def reduce(self, *, first: bool, final: bool) -> None:
        """Average the local gradients over the ranks into the partitions. A collective call.

        Args:
            first: the partitions hold nothing of this window yet.
            final: the optimizer step follows.
        """
        for partition in self.partitions:
            destinations = self._destinations(partition, first)
            for column, average in self._averages(partition):
                _store(average, column, destinations, add=not first)
        self.drop()
        if final:
            self.finalize()

    def _averages(self, partition: Partition) -> Iterator[tuple[int, torch.Tensor]]:
        """The averaged gradients of this rank's partition by chunks of columns, each sent while the next is packed."""
        world_size = dist.get_world_size(partition.process_group)
        width = max(1, CHUNK_BYTES // (world_size * partition.dtype.itemsize))
        width = min(width, partition.columns)
        device = partition.params[0].device
        packs = [torch.empty(world_size * width, dtype=partition.dtype, device=device) for _ in range(2)]
        before, after = self._scales(partition)
        pending: tuple[int, Pending] | None = None
        for column in range(0, partition.columns, width):
            packs.reverse()
            rows = packs[0][: world_size * min(width, partition.columns - column)].view(world_size, -1)
            self._pack(partition, column, rows)
            if before != 1.0:
                rows.mul_(before)
            sent = (column, reduce_scatter(rows, partition.process_group))
            if pending is not None:
                yield pending[0], pending[1].finish().mul_(after)
            pending = sent
        if pending is not None:
            yield pending[0], pending[1].finish().mul_(after)

    def _pack(self, partition: Partition, column: int, rows: torch.Tensor) -> None:
        for rank, row in enumerate(rows):
            end = 0
            for piece in partition.within(rank, column, column + len(row)):
                start, stop = piece.column - column, piece.end - column
                row[end:start].zero_()
                gradient = self.local(piece.param)
                if gradient is None:
                    row[start:stop].zero_()
                else:
                    row[start:stop].copy_(gradient.reshape(-1)[piece.start : piece.stop])
                end = stop
            row[end:].zero_()

    def _scales(self, partition: Partition) -> tuple[float, float]:
        """Factors before and after the sum. In half precision a plain sum over many ranks could overflow."""
        predivide = float(self.optimizer.gradient_predivide_factor)
        if predivide == 1.0 and partition.dtype.itemsize < 4:
            predivide = partition.divisor
        return 1.0 / predivide, predivide / partition.divisor


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

    def _destinations(self, partition: Partition, first: bool) -> list[tuple[int, torch.Tensor]]:
        optimizer, index = self.optimizer, partition.group
        if first:
            optimizer.averaged_gradients[index] = optimizer._build_compact_grad_partition_buffer(index)
        return [(0, optimizer.averaged_gradients[index].flat_partition)]

    def finalize(self) -> None:
        optimizer = self.optimizer
        if not optimizer.cpu_offload:
            return
        for index, params in enumerate(optimizer.params_in_partition):
            averaged = optimizer.averaged_gradients[index].flat_partition
            optimizer.single_partition_of_fp32_groups[index].grad.copy_(averaged)
            for param in params:
                key = optimizer.get_param_id(param)
                _, _, column, count = optimizer.grad_position[key]
                share = averaged.narrow(0, int(column), int(count))
                optimizer.norm_for_param_grads[key] = share.double().norm(2)
                optimizer.update_offload_overflow_tracker(share)

    def parameters_floor(self) -> dict[torch.nn.Parameter, int]:
        return {q: _share(p, q.numel() * q.element_size()) for p in self.partitions for q in p.params}

    def discard(self) -> None:
        for partition in self.partitions:
            self.optimizer.averaged_gradients[partition.group] = None


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
            divisor = optimizer._gradient_averaging_world_size(params, world_size)
            dtype = optimizer.communication_data_type
            partitions.append(Partition(process_group, params, sum(shares), pieces, float(divisor), dtype))
        return partitions

    def _destinations(self, partition: Partition, first: bool) -> list[tuple[int, torch.Tensor]]:
        kept, column, destinations = contract.stage_3_gradient_partitions(self.optimizer), 0, []
        for param in partition.params:
            destinations.append((column, kept[param.ds_id]))  # type: ignore[attr-defined]
            column += kept[param.ds_id].numel()  # type: ignore[attr-defined]
        return destinations

    def finalize(self) -> None:
        optimizer = self.optimizer
        if optimizer.offload_optimizer:
            optimizer._offload_boundary_param_ids = {param.ds_id for param in self.params}  # type: ignore[attr-defined]
            optimizer.zerosync_stock_finalize()
            return
        kept = contract.stage_3_gradient_partitions(optimizer)
        for index, group in enumerate(optimizer.fp16_groups):
            optimizer.averaged_gradients[index] = [kept[param.ds_id] for param in group]

    def parameters_floor(self) -> dict[torch.nn.Parameter, int]:
        floor = {}
        for param in self.optimizer.module.parameters():
            world_size = dist.get_world_size(self.optimizer._get_param_partition_group(param))
            floor[param] = param_size(param) * param.element_size() * (world_size - 1) // world_size
        return floor

    def discard(self) -> None:
        self.optimizer.averaged_gradients = {}


def param_size(param: Any) -> int:
    """Elements of ``param`` in full, gathered or released."""
    return int(getattr(param, "ds_numel", param.numel()))


def _share(partition: Partition, size: int) -> int:
    world_size = dist.get_world_size(partition.process_group)
    return size * (world_size - 1) // world_size


def _accumulated(param: Any) -> torch.Tensor | None:
    return getattr(param, "grad_accum", None)


def _store(source: torch.Tensor, column: int, destinations: list[tuple[int, torch.Tensor]], add: bool) -> None:
    """Write ``source``, which begins at ``column``, over the destinations or add it to them."""
    for begin, tensor in destinations:
        first, last = max(begin, column), min(begin + tensor.numel(), column + source.numel())
        if first < last:
            target = tensor.narrow(0, first - begin, last - first)
            part = source[first - column : last - column]
            if add:
                target.add_(part.to(target.device, target.dtype))
            else:
                target.copy_(part)
