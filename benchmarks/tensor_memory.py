"""The memory of tensors, counted as a GPU's allocator counts it, for ranks on the CPU.

The resident memory of a process says too little where only a part of the parameters can be held: the C library keeps
what was freed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from zerosync_strategy.tools.plan.measures import Ledger


class TensorMemory(TorchDispatchMode):
    """While active, counts the storages of all tensors that operators make: the gauge of automatic budgets.

    Attributes:
        most: bytes at once, ever.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = Ledger()
        self._resizes = self._ledger.following_resizes(to_zeros=False)
        self.most = 0

    def __enter__(self) -> TensorMemory:
        self._resizes.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resizes.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, lambda tensor: self._ledger.see(tensor), result)
        self.most = max(self.most, self.used())
        return result

    def used(self) -> int:
        """Return bytes now."""
        return sum(self._ledger.live.values())

    def peak(self) -> int:
        """Return the most at once, ever."""
        return self.most
