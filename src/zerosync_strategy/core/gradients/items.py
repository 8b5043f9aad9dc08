"""The mean over items, as tokens or examples, where backwards and ranks have different numbers of them.

The mean of the ranks' means is another number. With losses that are sums, the window divides their gradients once,
before the step, by the number of items of all backwards and ranks, which is known by then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class ItemCount:
    """Number of items of one window on this rank; where :attr:`counts`: ``loss_reduction`` is ``"sum"``."""

    def __init__(self, loss_reduction: str) -> None:
        self.counts = loss_reduction == "sum"
        self._items: float | torch.Tensor | None = None

    def add(self, items: float | torch.Tensor, divided_by: float) -> None:
        """Count items of the coming backward, whose loss is divided by ``divided_by``.

        ``items`` is a number, or a tensor of one element on any device, for which the host does not wait. Raises a
        ``ValueError`` if the tensor has another size, if the number is negative or not finite, or if losses are means.
        """
        if not self.counts:  # an option, the same on all ranks: otherwise only some would communicate in total()
            raise ValueError(
                "mean_over() was called where losses are means over their items. Let them be sums, and attach with the"
                " option loss_reduction='sum' on every rank."
            )
        if isinstance(items, torch.Tensor):
            if items.numel() != 1:
                raise ValueError(f"mean_over() takes one number of items, got a tensor of {items.numel()} elements.")
            items = items.detach().reshape(()).double()
        elif not 0 <= items < float("inf"):
            raise ValueError(f"mean_over() takes a number of items, 0 or more, got {items!r}.")
        items = items / divided_by
        self._items = items if self._items is None else self._items + items

    def reset(self) -> None:
        self._items = None

    def total(
        self, device: torch.device, sum_over_ranks: Callable[[torch.Tensor], None]
    ) -> torch.Tensor | None:  # fmt: skip
        """Return the number of items of all ranks, in fp64; ``None`` if losses are means. Collective.

        ``sum_over_ranks`` sums a tensor in place. Raises a ``RuntimeError`` if :meth:`add` was not called in this
        window.
        """
        if not self.counts:
            return None
        if self._items is None:
            raise RuntimeError(
                "The option loss_reduction='sum' needs the number of items, and mean_over() was not called since the"
                " last optimizer step. Call it before each backward, with 0 where this rank has none."
            )
        total = torch.zeros((), dtype=torch.float64, device=device)
        total += self._items if not isinstance(self._items, torch.Tensor) else self._items.to(device)
        sum_over_ranks(total)
        return total
