"""The gradients of one window that this rank has not reduced yet, in full."""

from __future__ import annotations

from typing import Any

import torch

from zerosync_strategy.core.engine import zero, zero3


class LocalGradients:
    """Local gradients of the parameters of one ZeRO optimizer.

    They stay where autograd accumulates them. Where DeepSpeed accumulates in another dtype than the parameters', so do
    they, and ``param.grad`` is empty between two backwards.

    Attributes:
        peak_bytes: the most bytes at once since :meth:`reset_peak`.
    """

    def __init__(self, optimizer: Any) -> None:
        self._dtype = zero.accumulation_dtype(optimizer)
        self._converts = self._dtype != zero.param_dtype(optimizer)
        self._present: set[Any] = set()
        self._bytes = 0
        self.peak_bytes = 0

    @property
    def on_parameters(self) -> bool:
        """Whether ``param.grad`` is the local gradient, between two backwards too."""
        return not self._converts

    def nbytes(self, param: Any) -> int:
        """Return the bytes of the gradient of ``param``."""
        return zero3.full_numel(param) * self._dtype.itemsize

    def get(self, param: Any) -> torch.Tensor | None:
        """Return the local gradient of ``param``, in full, or ``None``."""
        gradient: torch.Tensor | None = zero.accumulated_gradient(param) if self._converts else param.grad
        return gradient

    def add(self, param: Any, gradient: torch.Tensor) -> None:
        """Add ``gradient``, in full, to ``param.grad``, as autograd does; its memory stays the caller's."""
        if param.grad is None:
            with zero3.in_full_shape(param):
                param.grad = gradient.to(param.dtype, copy=True)
        else:
            param.grad.add_(gradient)

    def convert(self, param: Any) -> None:
        """Autograd has added to ``param.grad``: accumulate it in the dtype of accumulation."""
        if not self._converts or param.grad is None:
            return
        gradient = param.grad.to(self._dtype)
        before = zero.accumulated_gradient(param)
        zero.set_accumulated_gradient(param, gradient if before is None else before.add_(gradient))
        param.grad = None

    def count(self, param: Any) -> None:
        """Count the gradient of ``param``, which may be counted already."""
        if param not in self._present:
            self._present.add(param)
            self._bytes += self.nbytes(param)
            self.peak_bytes = max(self.peak_bytes, self._bytes)

    def discard(self, param: Any) -> None:
        """Drop the gradient of ``param``."""
        if param in self._present:
            self._present.remove(param)
            self._bytes -= self.nbytes(param)
        param.grad = None
        if self._converts:
            zero.set_accumulated_gradient(param, None)

    def reset_peak(self) -> None:
        """Count the peak anew."""
        self.peak_bytes = 0
