"""How many bytes of unsharded parameters there are, and the most at once (E1)."""

from __future__ import annotations

import weakref
from collections import deque

import torch


class UnshardedBytes:
    """Counts memory from when it is asked for until the last that refers to it lets go, whoever that is.

    Attributes:
        peak: the most bytes at once since the last :meth:`end_window`.
    """

    def __init__(self) -> None:
        self._now = self.peak = 0
        self._freed: deque[int] = deque()  # by whichever thread drops a tensor last; a thread of gloo may be late

    @property
    def now(self) -> int:
        """Bytes that are unsharded, or on their way, now."""
        while self._freed:
            self._now -= self._freed.popleft()
        return self._now

    def add(self, size: int) -> None:
        """So many bytes are being gathered."""
        self._now = self.now + size
        self.peak = max(self.peak, self._now)

    def are_in(self, tensor: torch.Tensor, size: int) -> None:
        """So many of the bytes added before are in the memory of ``tensor``, and go with it."""
        weakref.finalize(tensor.untyped_storage(), self._freed.append, size)

    def end_window(self) -> None:
        """Count the peak anew."""
        self.peak = self.now
