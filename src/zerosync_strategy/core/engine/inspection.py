"""What ``zerosync plan`` asks an engine: which tensors it keeps in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zerosync_strategy.core.engine import zero, zero3, zero3_optimizer


def resident(engine: Any) -> Mapping[str, list[torch.Tensor]]:
    """Return the tensors that an engine keeps between optimizer steps, by kind.

    ``"optimizer"``: master weights and optimizer states. ``"parameters"``: the module's parameters, sharded or full,
    and its buffers. ``"gradients"``: the shards in which ZeRO-3 keeps gradients. In fp32, master weights may be
    parameters, too.
    """
    module, optimizer = engine.module, engine.optimizer
    if zero.stage(engine) == 3:
        own = [param.ds_tensor for param in module.parameters() if zero3.is_sharded(param)]
        masters = optimizer.fp32_partitioned_groups_flat
        gradients = list(zero3_optimizer.gradient_shards(optimizer).values())
    else:
        own, masters, gradients = [], optimizer.single_partition_of_fp32_groups, []
    stepping = zero.stepping_optimizer(engine)
    states = (value for state in stepping.state.values() for value in state.values())
    stepped = (param.data for group in stepping.param_groups for param in group["params"])  # whole ones on ZeRO-3 (R6)
    return {
        "optimizer": [*(master.data for master in masters), *stepped, *filter(torch.is_tensor, states)],
        "parameters": [*(param.data for param in module.parameters()), *module.buffers(), *own],
        "gradients": gradients,
    }
