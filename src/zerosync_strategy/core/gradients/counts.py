"""What a window counts, and ranks compare or sum at the step: backwards, one of them the last, and items of losses.

:class:`LastBackward`: which backward of a window is its last, so that gradients are reduced while it runs. A framework,
DeepSpeed's accumulation or the program may *promise* it, on every rank alike. Without a promise it is *expected*: in
the first window as DeepSpeed's configuration says, later after as many backwards as all ranks have made in the window
before. An expectation may be wrong, on some ranks alone. What a rank issues:

=======================  ===========================  ===========================================================
backwards it has made    in the backwards             at the step
=======================  ===========================  ===========================================================
as many as expected      the pass, under the last     the norm
more                     the pass, under the          the norm, which says that it has more
                         expected one; no other
fewer, or none expected  nothing                      the pass, then the norm
if any rank has more     --                           then all: a second pass, and the norm again
=======================  ===========================  ===========================================================

So every rank issues the pass, the norm, and where one had more, the pass and the norm again: the same order, whatever
each has made, as a step sends nothing before the pass. What ranks say takes five numbers beside the sum of squares in
the norm's all-reduce: one, n, its square, whether gradients are left, and whether a reduced pass was dropped. All made
as many if the sum of the squares times the number of ranks is the square of the sum. At most one pass of a window is
under a backward, also if ``zero_grad()`` or an exception drops it.

:class:`ItemCount`: the mean over items, as tokens or examples, where backwards and ranks have different numbers of
them. The mean of the ranks' means is another number. With losses that are sums, the window divides their gradients
once, before the step, by the number of items of all backwards and ranks, which is known by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

NUMBERS = 5
"""What a rank says at the step."""


class LastBackward:
    """What is known of the last backward of each window of one engine.

    Args:
        overlaps: the option ``overlap_last``; ``False``: no backward is taken for the last.
        first: the backward that the first window expects to be its last, counted from 1.

    Attributes:
        expects: without a promise, a backward may be taken for the last; the same on all ranks.
        made: backwards since the last step, dropped ones included.
        began: a pass has begun under a backward that was taken for the last, since the last step.
        is_promised: this window has had a promise.
        is_running, has_streamed: the running or most recent backward was taken for the last; and it has reduced
            gradients while it ran.
    """

    def __init__(self, overlaps: bool, first: int | None) -> None:
        self.overlaps = self.expects = overlaps
        self.expected = first if overlaps else None
        self._promised: bool | None = None  # of the next backward
        self._more_follow = 0  # contexts
        self._dropped = self._surprised = False
        self._in_a_row = 0  # windows with as many backwards, on all ranks
        self._needed_in_a_row = 1
        self._steps = 0
        self._count: float | None = None  # backwards of the window before; None: not the same on all ranks
        self.made = 0
        self.began = self.is_promised = self.is_running = self.has_streamed = False

    def promise(self, is_last: bool) -> None:
        """Promise of the next backward, on every rank alike, that it is the last of its window, or that it is not."""
        self._promised, self.is_promised = is_last, True

    def expect_none(self) -> None:
        """Take no backward for the last without a promise. To be called on every rank."""
        self.expects, self.expected = False, None

    @contextmanager
    def more_follow(self) -> Iterator[None]:
        """Around backwards that are not the last."""
        self._more_follow += 1
        try:
            yield
        finally:
            self._more_follow -= 1

    def is_next(self) -> bool:
        """Return whether the backward that begins is taken for the last."""
        if not self.overlaps or self._more_follow or self.began:
            return False
        return self.made + 1 == self.expected if self._promised is None else self._promised

    def begin(self, is_last: bool) -> None:
        """Record that a backward has begun; ``is_last`` is what :meth:`is_next` has returned."""
        self.made += 1
        self._promised, self.is_running, self.has_streamed = None, is_last, False
        self.began |= is_last

    def dropped(self) -> None:
        """Record that the gradients of this window are dropped, with what ranks have reduced."""
        self._promised, self.is_running, self.has_streamed = None, False, False
        self._dropped |= self.began

    # ---- at the step ---------------------------------------------------------------------------------------------

    def numbers(self, is_left: bool) -> tuple[float, ...]:
        """Return what this rank says; ``is_left``: it has gradients that are not reduced."""
        return (1, self.made, self.made**2, is_left, self._dropped)

    def hear(self, sums: Sequence[float]) -> bool:
        """Take the sums over the ranks; return whether some rank has gradients left, so that all reduce again.

        Raises a ``RuntimeError``, on every rank alike, if some ranks have dropped a reduced pass and others have not.
        """
        ranks, made, squares, left, dropped = sums
        if 0 < dropped < ranks:
            raise RuntimeError(
                f"step() found that {dropped:.0f} of {ranks:.0f} ranks had dropped gradients, by zero_grad() or"
                " an exception, that were reduced in a backward which was expected to be the last, and the other ranks"
                " have them. Drop gradients on all ranks alike; or pass overlap_last=False, and each rank's own are"
                " reduced at the step."
            )
        if left:
            self._surprised = True
            return True
        self._learn(made / ranks if ranks * squares == made**2 else None)
        return False

    def _learn(self, count: float | None) -> None:
        """Choose what to expect of the next window. All ranks have heard the same, so they choose the same."""
        if self._surprised and self._steps:  # a program that surprises often must be steady for longer and longer
            self._needed_in_a_row *= 2
        self._in_a_row = self._in_a_row + 1 if count == self._count else 1
        self._count = count
        is_steady = count is not None and self._in_a_row >= self._needed_in_a_row
        self.expected = int(count) if is_steady and count is not None and self.expects else None
        self._surprised = False

    # ---- between two windows -------------------------------------------------------------------------------------

    def state(self) -> list[object]:
        """Return what is expected and why, for a checkpoint; the same on all ranks."""
        return [self._count, self._in_a_row, self._needed_in_a_row, self._steps, self.expected]

    def load(self, state: list[Any]) -> None:
        """Restore what :meth:`state` has returned."""
        self._count, self._in_a_row, self._needed_in_a_row, self._steps, expected = state
        self.expected = expected if self.expects else None

    def stepped(self) -> None:
        """Begin the next window."""
        self._steps += 1
        self.made = 0
        self._promised = None
        self.began = self.is_promised = self.is_running = self.has_streamed = self._dropped = False


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

    def take_total(
        self, device: torch.device, sum_over_ranks: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:  # fmt: skip
        """Return the number of items of all ranks in this window, in fp64, and begin the next. Collective.

        ``sum_over_ranks`` sums a tensor in place. Raises a ``RuntimeError`` if :meth:`add` was not called in this
        window.
        """
        if self._items is None:
            raise RuntimeError(
                "The option loss_reduction='sum' needs the number of items, and mean_over() was not called since the"
                " last optimizer step. Call it before each backward, with 0 where this rank has none."
            )
        total = torch.zeros((), dtype=torch.float64, device=device)
        total += self._items if not isinstance(self._items, torch.Tensor) else self._items.to(device)
        self._items = None
        sum_over_ranks(total)
        return total
