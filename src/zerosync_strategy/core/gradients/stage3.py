"""The reduction of ZeRO-3: each parameter is cut by itself; it may be released while its gradient is there in full."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.profile import phase
from zerosync_strategy.core.engine import zero, zero3, zero3_optimizer
from zerosync_strategy.core.gradients.buckets import choose_buckets
from zerosync_strategy.core.gradients.cut import CutBucket
from zerosync_strategy.core.gradients.layout import CutLayout, ShardLayout
from zerosync_strategy.core.gradients.reducer import Pieces, Reducer, pieces_of, sent_by_one_rank
from zerosync_strategy.core.options.config import ZeroSyncConfig


class Stage3Reducer(Reducer):
    """Reduces into one shard per parameter, over the process group that shards the parameter."""

    layouts: list[CutLayout]

    def _read_layouts(self) -> list[CutLayout]:
        optimizer = self.optimizer
        self._shards_on_device = not zero.offloads(optimizer)
        by_group: dict[Any, list[Any]] = {}
        for param in (param for group in zero3_optimizer.param_groups(optimizer) for param in group):
            by_group.setdefault(zero3_optimizer.gradient_group(optimizer, param), []).append(param)
        layouts = []
        for process_group, params in by_group.items():
            world_size = dist.get_world_size(process_group)
            shard_numels = [zero3.shard_numel(param) for param in params]
            # The loss is the mean over all data-parallel ranks; so is its gradient, however few share a parameter.
            ranks = max(world_size, dist.get_world_size(zero.data_parallel_group(optimizer)))
            divisor = zero3_optimizer.averaging_divisor(optimizer, params, ranks)
            dtype = optimizer.communication_data_type
            layouts.append(CutLayout(process_group, params, shard_numels, divisor, dtype))
        return layouts

    def _make_buckets(self, config: ZeroSyncConfig, limit: int, names: Mapping[Any, str]) -> list[CutBucket]:
        common = {"chunk_bytes": self._chunk_bytes, "local": self.local, "streams": self.streams, "names": names}
        buckets = [
            CutBucket(layout, params, deferred, **common)
            for layout, chosen in choose_buckets(self.layouts, self.local, config, limit)
            for params, deferred in chosen
        ]
        # With several layouts, those of the later modules first.
        return sorted(buckets, key=lambda bucket: -max(map(zero3.param_id, bucket.params)))

    def _allocate_shards(self) -> None:
        pass  # DeepSpeed keeps them

    def shard_parts(self, layout: ShardLayout, offset: int, numel: int) -> list[torch.Tensor]:
        assert isinstance(layout, CutLayout)
        shards, columns = zero3_optimizer.gradient_shards(self.optimizer), layout.column_list
        parts: list[torch.Tensor] = []
        index, end = bisect_right(columns, offset) - 1, offset + numel
        while offset < end:
            shard = shards[zero3.param_id(layout.params[index])]
            first = offset - columns[index]
            part = shard.narrow(0, first, min(shard.numel(), end - columns[index]) - first)
            offset += part.numel()
            parts.append(part)
            index += 1
        return _joined(parts)

    def hand_over(self) -> None:
        zero3_optimizer.hand_over_gradients(self.optimizer, self.params, joined=self._computes_norm)

    def compute_norm(self) -> torch.Tensor:
        (norm,) = zero3_optimizer.gradient_norms(self.optimizer)
        return norm

    @property
    def _computes_norm(self) -> bool:
        """Whether the norm is that of all shards of all ranks, which have each element once, where they are."""
        return self._shards_on_device and not zero3_optimizer.is_model_parallel(self.optimizer)

    @property
    def over_groups(self) -> bool:
        """Whether some parameters are sharded over fewer ranks than all; the same on every rank."""
        everyone = dist.get_world_size(zero.data_parallel_group(self.optimizer))
        return any(layout.world_size < everyone for layout in self.layouts)

    def combine_norms(self, stock: Callable[[], Any]) -> torch.Tensor:
        """Return the norm of all gradients, the same on every rank (U3).

        Where DeepSpeed computes it, it does by group of parameters, and sums over the ranks that shard these.
        Parameters of another group of ranks are others, so each of its ranks adds its share of the square, and each
        element counts once. A collective call.
        """
        from deepspeed import comm

        optimizer = self.optimizer
        if self._computes_norm:
            with phase("norm"):
                return zero3_optimizer.norm_of_shards(optimizer)
        stacked = torch.stack([torch.as_tensor(norm) for norm in stock()])
        # DeepSpeed marks the norm of a group with an infinity or a NaN by -1.
        stacked = torch.where(stacked >= 0, stacked, torch.inf)
        if not self.over_groups:
            return stacked.norm()
        squares = stacked.double().square().to(self.params[0].device)  # offloaded, they are on the host
        for index, group in enumerate(zero3_optimizer.param_groups(optimizer)):
            world_size = dist.get_world_size(zero3_optimizer.gradient_group(optimizer, group[0]))
            squares[index] /= zero3_optimizer.averaging_divisor(optimizer, group, world_size)
        total = squares.sum()
        comm.all_reduce(total, group=zero.data_parallel_group(optimizer))
        return total.sqrt().to(stacked)

    def pieces(self) -> Pieces:
        """As in the base class; nothing is sent by piece, but the C library gives small temporary tensors at once."""
        masters = zero3_optimizer.flat_master_weights(self.optimizer)
        return [(flat, list(pieces_of(flat, 0, flat.numel()))) for flat in masters]

    def _discard_shards(self) -> None:
        zero3_optimizer.discard_gradients(self.optimizer)

    def parameters_floor(self) -> dict[Any, int]:
        floor = {}
        for param in zero3_optimizer.all_parameters(self.optimizer):
            world_size = dist.get_world_size(zero3_optimizer.gradient_group(self.optimizer, param))
            floor[param] = sent_by_one_rank(zero3.full_bytes(param), world_size)
        return floor


def _joined(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``parts`` in as few tensors as can be: DeepSpeed lays the shards one after the other into one buffer."""
    joined: list[torch.Tensor] = []
    for part in parts:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.data_ptr() + last.nbytes == part.data_ptr()
            and (last.untyped_storage().data_ptr() == part.untyped_storage().data_ptr())
        ):
            joined[-1] = last.as_strided((last.numel() + part.numel(),), (1,))
        else:
            joined.append(part)
    return joined
