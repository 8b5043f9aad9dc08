"""``module.zero_grad()`` drops gradients as it does in plain torch, also those that the module no longer has (N1).

An optimizer's ``zero_grad()`` is overridden where the optimizer is ours; a module may be a part of a model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from zerosync_strategy.core.attached.engine import AttachedEngine
from zerosync_strategy.core.engine import patches, zero3


def let_modules_zero() -> None:
    """Let ``zero_grad()`` of any module reach the engines that train its parameters."""
    patches.replace(patches.ZERO_GRAD, _zero_grad)


def _zero_grad(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def zero_grad(module: Any, *args: Any, **kwargs: Any) -> None:
        with zero3.as_it_is():
            stock(module, *args, **kwargs)
        params = set(map(id, module.parameters()))
        for attached in list(AttachedEngine.all):
            attached.module_zeroed(params)

    return zero_grad
