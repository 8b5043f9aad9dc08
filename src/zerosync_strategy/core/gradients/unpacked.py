"""Buckets of ZeRO-3: gradients stay where autograd accumulates them, and are packed in one call when it is reduced."""

from __future__ import annotations

from typing import Any

import torch

from zerosync_strategy.core.engine import zero
from zerosync_strategy.core.gradients.buckets import GradientBucket
from zerosync_strategy.core.gradients.local import LocalGradient
from zerosync_strategy.core.gradients.owned import OwnedPlacement
from zerosync_strategy.core.gradients.per_param import ColumnPlacement


class UnpackedBucket(GradientBucket):
    """A bucket of which nothing is kept but its gradients."""

    placement: ColumnPlacement | OwnedPlacement

    def collect(self, gradient: LocalGradient) -> None:
        param, place = gradient.param, gradient.place
        found = param.grad
        if found is None:
            if self.local.converts:
                zero.set_accumulated_gradient(param, None)  # a hook has dropped it
            return
        if self.local.converts:
            more, before = found.detach().to(self.local.dtype), zero.accumulated_gradient(param)
            found = more if before is None else before.add_(more)
            zero.set_accumulated_gradient(param, found)
            param.grad = None
        if place is None:
            self.local.count(self.local.nbytes(param))
        gradient.place = found

    def _drop(self) -> None:
        self.local.count(-sum(self.local.nbytes(each.param) for each in self.gradients if each.place is not None))
        for gradient in self.gradients:
            gradient.place = gradient.param.grad = None
            if self.local.converts:
                zero.set_accumulated_gradient(gradient.param, None)

    def _packed(self) -> torch.Tensor:
        gradients = [self._gradient(param) for param in self.placement.order]
        self._reads(*gradients)
        return self.placement.pack(gradients, self.dtype)

    def _gradient(self, param: Any) -> torch.Tensor | None:
        return zero.accumulated_gradient(param) if self.local.converts else param.grad
