"""What a program in Fabric does with an optimizer under ZeRO: it clips, and says which backward is the last."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from zerosync_strategy import frontend
from zerosync_strategy.frontend import Stock, ZeroSync

from .prepared import unwrap_prepared


class OptimizerOverrides(Stock):
    """Overrides of a ZeRO optimizer."""

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # DeepSpeed passes a list of shards, by keyword.
        if args and isinstance(args[0], Mapping):
            raise RuntimeError(
                "load_state_dict() of an optimizer under ZeRO was given the state of an optimizer without ZeRO, which"
                " it cannot shard. Load weights alone, or what fabric.save() has saved under ZeRO."
            )
        super().load_state_dict(*args, **kwargs)


class BackwardSync:
    """The control behind ``fabric.no_backward_sync``."""

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        """Suppress nothing. With ``enabled=False``, the next backward is the last, so it may reduce while it runs."""
        zerosync = frontend.handle_of(unwrap_prepared(module))
        if zerosync is not None:
            zerosync.window.expect_last(not enabled)
        return nullcontext()


def zerosync_of(optimizer: Any) -> ZeroSync:
    """Return the handle of the engine of ``optimizer``; a ``RuntimeError`` if it has none."""
    zerosync = frontend.handle_of(optimizer)
    if zerosync is None:
        raise RuntimeError(
            f"The {type(optimizer).__name__} was not set up by fabric.setup(model, optimizer), which returns the"
            " optimizer to step and to clip."
        )
    return zerosync


def clip_norm(zerosync: ZeroSync, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """See :meth:`ZeroSyncFabricStrategy.clip_gradients_norm`."""
    if norm_type != 2 or max_norm == 0 or zerosync.clips_next_step:
        with zerosync.full_gradients():
            return torch.nn.utils.clip_grad_norm_(
                zerosync.parameters, max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
            )
    norm = zerosync.gradient_norm()
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"fabric.clip_gradients() found a norm of {norm.item()} and cannot clip to max_norm={max_norm}. Leave"
            " out the step, or pass error_if_nonfinite=False: DeepSpeed then skips it."
        )
    if not math.isinf(max_norm):
        zerosync.clip_next_step(max_norm)
    return norm
