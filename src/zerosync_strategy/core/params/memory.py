"""The count of bytes of unsharded parameters, and the most at once (E1)."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

import torch


class UnshardedBytes:
    """Counts memory from when it is asked for until nothing refers to it, whoever did.

    Attributes:
        peak: the most bytes at once since the last :meth:`end_window`.
        watch: called before bytes are added.
    """

    def __init__(self) -> None:
        self.watch: Callable[[], None] | None = None
        self._now = self.peak = 0
        self._freed: deque[int] = deque()  # by whichever thread drops a tensor last; a thread of gloo may be late

    @property
    def now(self) -> int:
        """Bytes that are unsharded, or on their way, now."""
        while self._freed:
            self._now -= self._freed.popleft()
        return self._now

    def add(self, nbytes: int) -> None:
        """Count bytes that are being gathered."""
        if self.watch is not None:
            self.watch()
        self._now = self.now + nbytes
        self.peak = max(self.peak, self._now)

    def free_with(self, tensor: torch.Tensor, nbytes: int) -> None:
        """Count ``nbytes`` of those added before until the memory of ``tensor`` is free."""
        weakref.finalize(tensor.untyped_storage(), self._freed.append, nbytes)

    def end_window(self) -> None:
        """Count the peak anew."""
        self.peak = self.now
