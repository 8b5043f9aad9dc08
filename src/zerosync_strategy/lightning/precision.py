"""Precision under DeepSpeed: where Lightning closes the window and clips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.types import Steppable
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer
from typing_extensions import override

from zerosync_strategy.core.attach import ZeroSync

CLIP_BY_VALUE = (
    "ZeRO cannot clip gradients by value: each rank holds a partition. Got gradient_clip_algorithm='value'; use 'norm'."
)


class ZeroSyncPrecision(DeepSpeedPrecision):
    """``DeepSpeedPrecision`` that reduces before ``on_before_optimizer_step`` and clips the coming step by norm."""

    def __init__(self, precision: Any, zerosync: Callable[[], ZeroSync]) -> None:
        super().__init__(precision)
        self._zerosync = zerosync

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Steppable, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if model.automatic_optimization:
            self._zerosync().window.expect_last()  # the closure's backward, and Lightning accumulates no further

        def closure_then_reduce() -> Any:
            result = closure()
            self._zerosync().reduce()
            return result

        return super().optimizer_step(optimizer, model, closure_then_reduce, **kwargs)

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
            self._zerosync().clip_next_step(float(clip_val))
