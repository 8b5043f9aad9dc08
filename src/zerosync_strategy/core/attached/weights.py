"""The full weights of an attached engine, for inference engines and files."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from zerosync_strategy.core.attached.engine import AttachedEngine
from zerosync_strategy.core.engine import zero
from zerosync_strategy.core.params.export import export
from zerosync_strategy.core.params.full_weights import FullWeights


def full_weights(attached: AttachedEngine, module: torch.nn.Module | None, dtype: torch.dtype | None) -> FullWeights:
    """Return the full weights of ``module``, in the engine's; see :meth:`ZeroSync.full_weights`."""
    if module is None:
        module = attached.engine.module
    elif all(each is not module for each in attached.engine.module.modules()):
        raise ValueError(
            f"full_weights() and export() take a module= of the engine's {type(attached.engine.module).__name__}, found"
            f" a {type(module).__name__} that is none. Give the engine's module or one in it."
        )
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(
            f"full_weights() and export() take a dtype= for floating-point weights, got {dtype}. Leave it out, or"
            " convert the tensors."
        )
    return FullWeights(module, attached.scheduler, dtype, attached.version, attached.activity)


def export_weights(
    attached: AttachedEngine, directory: Path, module: torch.nn.Module | None, dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> None:  # fmt: skip
    """Write the full weights of ``module``; see :meth:`ZeroSync.export`."""
    everyone = zero.data_parallel_group(attached.engine.optimizer)
    weights = full_weights(attached, module, dtype)
    if any(dist.get_world_size(group) < dist.get_world_size(everyone) for group in weights.process_groups):
        raise ValueError(
            "export() found parameters that shard_over() gives to groups of ranks: under one name, each group has"
            " another. Write what full_weights() yields on the first rank of each group."
        )
    with attached.activity("export()"):
        export(weights, directory, max_shard_bytes, everyone, module or attached.engine.module, dtype)
