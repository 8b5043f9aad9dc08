"""DeepSpeed's ``GatheredParameters`` contexts: what is gathered for one, and the claim that it has until its end."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zerosync_strategy.core.engine import patches
from zerosync_strategy.core.engine.parameter import Claim, Record


def intercept() -> None:
    """Let ``GatheredParameters`` contexts be entered and left by way of this module."""
    patches.replace(patches.ENTER_GATHERED, _enter)
    patches.replace(patches.LEAVE_GATHERED, _leave)


def _enter(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(stock)
    def enter(context: Any) -> None:
        by_owner: dict[Any, list[Any]] = {}
        for record in _records(context):
            by_owner.setdefault(record.owner, []).append(record.param)
        for owner, params in by_owner.items():
            owner.gather_for_context(params)
        stock(context)
        for record in _records(context):
            record.claim(Claim.CONTEXT)

    return enter


def _leave(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def leave(context: Any, *error: Any) -> Any:
        writes = context.enabled and context.src_rank is not None
        try:
            with _broadcastable(context.params if writes else ()):
                return stock(context, *error)
        finally:
            for record in _records(context):
                record.drop(Claim.CONTEXT)

    return leave


def _records(context: Any) -> list[Record]:
    """Return the records of the context's parameters, of attached engines."""
    params = context.params if context.enabled else ()
    return [param._zerosync_record for param in params if "_zerosync_record" in param.__dict__]


@contextmanager
def _broadcastable(params: Iterable[Any]) -> Iterator[None]:
    """While active, gathered ``params`` have a dimension (``scalars.py``)."""
    scalars = [param for param in params if param.dim() == 0]
    for param in scalars:
        param.data = param.data.view(1)
    try:
        yield
    finally:
        with torch._C.DisableTorchFunctionSubclass():
            for param in scalars:
                if param.numel() == 1:  # it stays gathered
                    param.data = param.data.view(())
