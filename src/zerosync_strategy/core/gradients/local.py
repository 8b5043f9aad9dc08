"""The gradients of one window that this rank has not reduced yet: in which dtype, and how many bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerosync_strategy.core.engine import zero, zero3


class LocalGradients:
    """What the local gradients of one ZeRO optimizer have in common.

    Attributes:
        dtype: in which they are accumulated.
        converts: that is another one than the parameters'; then ``param.grad`` is empty between two backwards.
        peak_bytes: the most bytes at once since :meth:`reset_peak`.
        watch: called before bytes are counted.
    """

    def __init__(self, optimizer: Any) -> None:
        self.dtype = zero.accumulation_dtype(optimizer)
        self.converts = self.dtype != zero.param_dtype(optimizer)
        self.peak_bytes = 0
        self.watch: Callable[[], None] | None = None
        self._bytes = 0

    def nbytes(self, param: Any) -> int:
        """Return the bytes of the gradient of ``param``."""
        return zero3.full_numel(param) * self.dtype.itemsize

    def count(self, nbytes: int) -> None:
        """Count bytes that are allocated, or freed if negative."""
        if self.watch is not None:
            self.watch()
        self._bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    @property
    def now(self) -> int:
        """Bytes that are there now."""
        return self._bytes

    def reset_peak(self) -> None:
        """Count the peak anew."""
        self.peak_bytes = self._bytes
