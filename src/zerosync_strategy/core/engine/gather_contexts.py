"""DeepSpeed's ``GatheredParameters`` contexts: what is gathered for one, and what its end leaves gathered."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any, Protocol


class ContextGathers(Protocol):
    """Gathers what a ``GatheredParameters`` context is to hold."""

    def gather_for_context(self, params: Iterable[Any]) -> None:
        """Gather those of ``params`` that are this object's to gather. Collective."""


_context_gathers: weakref.WeakSet[Any] = weakref.WeakSet()

reading_ends = False  # a GatheredParameters context that was there to read is left


def gather_contexts_by(gathers: ContextGathers) -> None:
    """Let ``gathers`` gather for the ``GatheredParameters`` contexts of this process, before DeepSpeed looks.

    A context that was there to read releases nothing that is held until the step.
    """
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    _context_gathers.add(gathers)
    stock, stock_exit = GatheredParameters.__enter__, GatheredParameters.__exit__
    if getattr(stock, "zerosync", False):
        return

    @functools.wraps(stock)
    def enter(context: Any) -> None:
        for each in list(_context_gathers) if context.enabled else ():
            each.gather_for_context(context.params)
        stock(context)

    @functools.wraps(stock_exit)
    def leave(context: Any, *error: Any) -> Any:
        global reading_ends
        reading_ends = context.enabled and context.src_rank is None
        try:
            return stock_exit(context, *error)
        finally:
            reading_ends = False

    enter.zerosync = True  # type: ignore[attr-defined]
    GatheredParameters.__enter__, GatheredParameters.__exit__ = enter, leave


def gather_no_context_by(gathers: ContextGathers) -> None:
    """Undo :func:`gather_contexts_by`."""
    _context_gathers.discard(gathers)
