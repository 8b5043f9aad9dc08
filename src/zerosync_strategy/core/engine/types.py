"""Names of DeepSpeed's and torch's objects for signatures. DeepSpeed's are ``Any`` to a checker, but the parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

__all__ = [
    "DeepSpeedEngine", "Store", "Work", "Zero3Optimizer", "Zero3Parameter", "Zero12Optimizer", "ZeroOptimizer",
]  # fmt: skip

Store = Any  # torch's; its stubs lack half of the methods

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Zero3Optimizer
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Zero12Optimizer

    ZeroOptimizer = Zero12Optimizer | Zero3Optimizer

    class Zero3Shard(torch.Tensor):
        """This rank's shard of a parameter, flat and padded."""

        ds_numel: int
        final_location: Any  # DeepSpeed's enum; None: in memory

    class Zero3Parameter(torch.nn.Parameter):
        """A parameter that ZeRO-3 shards; ``zero3.is_sharded()`` tells. Its ``data`` has no elements while sharded."""

        ds_id: int
        ds_numel: int
        ds_shape: torch.Size
        ds_tensor: Zero3Shard
        ds_status: Any  # DeepSpeed's enum
        ds_persist: bool
        ds_active_sub_modules: set[int]
        ds_process_group: dist.ProcessGroup
        all_gather: Any  # three functions that DeepSpeed sets
        all_gather_coalesced: Any
        partition: Any
        _zerosync_record: Any  # a Record, of an attached engine

else:  # annotations are not evaluated; these names are for imports
    DeepSpeedEngine = Zero3Optimizer = Zero12Optimizer = ZeroOptimizer = Zero3Parameter = Any


class Work(Protocol):
    """A collective in flight: a work of torch's, or what stands for several."""

    @property
    def wait(self) -> Callable[..., object]: ...
    def is_completed(self) -> bool: ...
