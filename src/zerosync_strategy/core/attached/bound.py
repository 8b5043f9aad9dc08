"""The bound on unreduced gradients where no budget is given: what the device cannot hold is reduced as it comes.

Stock DeepSpeed's ZeRO-2 and 3 keep a shard of the gradients between two backwards; ZeroSync keeps them in full, to
reduce them once. A model that trains only because they are sharded must train here, too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from zerosync_strategy.core.announcement import say
from zerosync_strategy.core.budgets.automatic import DeviceGauge
from zerosync_strategy.core.comm.collectives import largest
from zerosync_strategy.core.engine import zero, zero3
from zerosync_strategy.core.gradients.stage12 import why_stock
from zerosync_strategy.core.options.config import ZeroSyncConfig
from zerosync_strategy.core.report import size_text

SHARE = 4
"""Unreduced gradients may take a quarter of the device beyond what stock DeepSpeed holds of them."""


def device_memory(device: torch.device) -> tuple[int, int] | None:
    """Return the bytes that are free for this process, and all of ``device``; ``None`` if that is not known."""
    if device.type != "cuda":
        return None
    gauge = DeviceGauge(device)
    return gauge.limit() - gauge.used(), torch.cuda.mem_get_info(device)[1]


def bounded(engine: Any, config: ZeroSyncConfig, ranks: int) -> ZeroSyncConfig:
    """Return ``config``, with ``coalesce=False`` if unreduced gradients would not fit. Collective on such devices.

    ``ranks``: that shard the gradients. An option that says what to keep is kept.
    """
    memory = device_memory(engine.device)
    if memory is None or not config.coalesce or config.grad_memory_budget is not None:
        return config
    if zero.stage(engine) < 3 and why_stock(engine.optimizer):
        return config  # its gradients are reduced at the close
    free, device = memory
    numel = sum(zero3.full_numel(param) for param in engine.module.parameters() if param.requires_grad)
    full = numel * zero.accumulation_dtype(engine.optimizer).itemsize
    stock = full if zero.stage(engine) == 1 else full // ranks
    exceeds = full > free or (full - stock) * SHARE > device
    if not largest([int(exceeds)], zero.data_parallel_group(engine.optimizer))[0]:
        return config
    if torch.distributed.get_rank() == 0:
        say(
            f"the gradients of one rank take {size_text(full)} until they are reduced, of {size_text(free)} that are"
            f" free on {size_text(device)}: each backward reduces its own, as stock DeepSpeed does (coalesce=False)."
            " grad_memory_budget says how much may stay unreduced, and saves that much of each further backward."
        )
    return dataclasses.replace(config, coalesce=False)
