"""Precision under DeepSpeed: where Lightning closes the window and clips."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer
from typing_extensions import override

from zerosync_strategy.core.handle import ZeroSync

CLIP_BY_VALUE = (
    "ZeRO cannot clip gradients by value: each rank holds a partition. Got gradient_clip_algorithm='value'; use 'norm'."
)


class ZeroSyncPrecision(DeepSpeedPrecision):
    """``DeepSpeedPrecision`` that reduces before ``on_before_optimizer_step`` and clips the coming step by norm."""

    @override
    def backward(  # type: ignore[override]
        self, tensor: torch.Tensor, model: LightningModule, optimizer: Steppable | None, *args: Any, **kwargs: Any
    ) -> None:
        """Run by the first engine, whose hooks gather the parameters; the gradients say which engines it concerns."""
        zerosyncs = model.trainer.strategy.zerosyncs  # type: ignore[attr-defined]
        with ExitStack() as stack:
            if len(zerosyncs) > 1:
                for zerosync in zerosyncs:
                    stack.enter_context(zerosync.awaiting_backward())
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Steppable, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        zerosync = _zerosync_of(optimizer)
        if model.automatic_optimization:
            zerosync.window.expect_last()  # the closure's backward, and Lightning accumulates no further
        result = closure()
        zerosync.reduce()
        self._after_closure(model, optimizer)
        if result is None and model.automatic_optimization:
            raise MisconfigurationException(
                "training_step() returned None, so no backward ran, and DeepSpeed cannot leave out its step. Return a"
                " loss, or use manual optimization and leave out optimizer.step()."
            )
        return zerosync.engine.step(**kwargs)

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            raise MisconfigurationException(CLIP_BY_VALUE)
        if clip_val > 0:
            _zerosync_of(optimizer).clip_next_step(float(clip_val))


def _zerosync_of(optimizer: Any) -> ZeroSync:
    zerosync = getattr(optimizer, "_zerosync", None)
    if zerosync is None:
        raise MisconfigurationException("Gradients can be clipped and stepped in Trainer.fit() only.")
    return zerosync
