"""Models that torch takes and DeepSpeed 0.19.8 does not: what engines of this process may be made of.

- Parameters without dimensions, as CLIP's ``logit_scale``: DeepSpeed broadcasts each as bytes, which torch makes none
  of. It fails when it starts, and when a context has gathered one for a rank to change, as it does to save the model.
- Parameters in any memory layout (``memory_layout``).
- Modules that return what has no attributes, as a number: under ZeRO-3 DeepSpeed looks for tensors in ``vars()`` of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zerosync_strategy.core.engine import contract, deepspeed_internals, memory_layout, param_functions, patches


def allow_any_model() -> None:
    """Let engines that are made in this process take such models."""
    contract.require(deepspeed_internals.ANY_MODEL)
    patches.wrap(patches.CONFIGURE_MODEL, _configure_model)
    patches.wrap(patches.BROADCAST_MODEL, _broadcast_model)
    patches.wrap(patches.SHARD, _shard)
    # In place of the builtin, in that file alone.
    patches.replace(patches.OUTPUTS, lambda _: lambda output: getattr(output, "__dict__", {}))
    param_functions.intercept_contexts()


def _configure_model(stock: Callable[[Any, Any], None], engine: Any, model: Any) -> None:
    memory_layout.prepare_to_broadcast(model)  # and before it is converted to another dtype
    stock(engine, model)


def _broadcast_model(stock: Callable[[Any], None], engine: Any) -> None:
    scalars = [param for param in engine.module.parameters() if param.dim() == 0]
    for param in scalars:
        param.data = param.data.view(1)
    try:
        stock(engine)
    finally:
        for param in scalars:
            param.data = param.data.view(())


def _shard(stock: Callable[[Any, Any], None], init: Any, param: Any) -> None:
    memory_layout.prepare_to_shard(param)
    if param.dim():
        return stock(init, param)
    param.data = param.data.view(1)
    stock(init, param)
    param.ds_shape = torch.Size(())  # that of every gather from now on
