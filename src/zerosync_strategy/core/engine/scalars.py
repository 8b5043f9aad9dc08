"""Parameters without dimensions, as CLIP's ``logit_scale``: DeepSpeed 0.19.8 fails when it starts with one,
and when a context has gathered one for a rank to change, as it does to save the model.

It broadcasts each parameter as bytes, on every device, and torch makes no bytes of a tensor without dimensions.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from zerosync_strategy.core.engine import memory_layout


@functools.cache
def allow_scalars() -> None:
    """Let the engines that are made in this process take parameters without dimensions, and in any memory layout."""
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init

    configure = getattr(DeepSpeedEngine, "_configure_distributed_model", None)
    broadcast_model = getattr(DeepSpeedEngine, "_broadcast_model", None)
    init_param = getattr(Init, "_zero_init_param", None)
    if configure is not None:

        @functools.wraps(configure)
        def configure_model(engine: Any, model: Any) -> None:
            memory_layout.prepare_to_broadcast(model)  # and before it is converted to another dtype
            configure(engine, model)

        DeepSpeedEngine._configure_distributed_model = configure_model
    if broadcast_model is not None:

        @functools.wraps(broadcast_model)
        def broadcast(engine: Any) -> None:
            scalars = [param for param in engine.module.parameters() if param.dim() == 0]
            for param in scalars:
                param.data = param.data.view(1)
            try:
                broadcast_model(engine)
            finally:
                for param in scalars:
                    param.data = param.data.view(())

        DeepSpeedEngine._broadcast_model = broadcast
    if init_param is not None:

        @functools.wraps(init_param)
        def shard(init: Any, param: Any) -> None:
            memory_layout.prepare_to_shard(param)
            if param.dim():
                return init_param(init, param)
            param.data = param.data.view(1)
            init_param(init, param)
            param.ds_shape = torch.Size(())  # that of every gather from now on

        Init._zero_init_param = shard

    leave_context = GatheredParameters.__exit__

    @functools.wraps(leave_context)
    def leave(context: Any, *error: Any) -> Any:
        if not context.enabled or context.src_rank is None:
            return leave_context(context, *error)
        scalars = [param for param in context.params if param.dim() == 0]
        for param in scalars:
            param.data = param.data.view(1)
        try:
            return leave_context(context, *error)
        finally:
            with torch._C.DisableTorchFunctionSubclass():
                for param in scalars:
                    if param.numel() == 1:  # it stays gathered
                        param.data = param.data.view(())

    GatheredParameters.__exit__ = leave
