"""Running statistics of BatchNorm and the like: after each step, all ranks have those of the first rank (N1).

In training, such a layer normalises by its own batch, and each rank's statistics are of the batches that the rank has
seen. So they would differ in an evaluation, and in what ranks save. PyTorch's DistributedDataParallel broadcasts all
buffers before each forward. Here it is these alone, once per step, however the program evaluates; other buffers are
left to the program, which may keep something of each rank in them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from zerosync_strategy.core.comm.collectives import note_launch
from zerosync_strategy.core.comm.journal import SentCounter
from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.engine.torch_internals import for_training

_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
"""Not SyncBatchNorm, whose statistics are of the batches of all ranks."""
_LABEL = "the broadcast of running statistics"


class RunningStatistics:
    """The running statistics of ``layers``, which the first rank of ``process_group`` gives to all."""

    def __init__(self, layers: Sequence[nn.Module], process_group: ProcessGroup, counter: SentCounter) -> None:
        self._layers, self._group, self._counter = layers, process_group, counter

    @classmethod
    def of(cls, module: nn.Module, process_group: ProcessGroup, counter: SentCounter) -> RunningStatistics | None:
        """Return those of ``module``; ``None`` if there are none to share.

        Layers with parameters that not all ranks share, as in experts, are left out.
        """
        from deepspeed.moe.utils import is_moe_param

        layers = [
            each
            for each in module.modules()
            if isinstance(each, _LAYERS)
            and not any(is_moe_param(param) or zero3.has_own_group(param) for param in each.parameters())
        ]
        return cls(layers, process_group, counter) if layers and dist.get_world_size(process_group) > 1 else None

    @for_training
    @torch.no_grad()
    def share(self) -> None:
        """Give all ranks the statistics of the first. Collective."""
        from deepspeed import comm

        by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for buffer in (buffer for layer in self._layers for buffer in layer.buffers(recurse=False)):
            by_kind.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        for (_, device), buffers in by_kind.items():
            packed = torch.cat([buffer.view(-1) for buffer in buffers])
            with self._counter.apart("running statistics"):
                self._counter.add("broadcast", packed.nbytes, self._group)
            comm.broadcast(packed, dist.get_global_rank(self._group, 0), group=self._group)
            note_launch(self._group, device, _LABEL)
            parts = packed.split([buffer.numel() for buffer in buffers])
            torch._foreach_copy_(buffers, [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)])
