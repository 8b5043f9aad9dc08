"""DeepSpeed's ``safe_get_full_grad`` and its kin, for parameters whose gradients a window keeps local.

They reach a parameter's shards through attributes that DeepSpeed sets on the parameter, and on ZeRO-3 also through
methods of the optimizer, which ``overrides.py`` overrides.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from zerosync_strategy.core.engine import contract, deepspeed_internals, patches

# safe_get_full_grad() calls get_full_hp_grad() of a parameter with this attribute, and returns the result.
_MARK = deepspeed_internals.MARKED_GRADIENT.name
_GET, _SET, _GET_VALUE, _SET_VALUE = "get_full_hp_grad", "set_full_hp_grad", "get_full_hp_param", "set_full_hp_param"
_STAGE_1_2 = frozenset({_GET, _SET, _GET_VALUE, _SET_VALUE})


def intercept(params: Iterable[Any], hooks: Any) -> None:
    """Make DeepSpeed's functions call ``hooks``, a ``PendingGradients``, for ``params`` until :func:`release`."""
    from deepspeed.utils.tensor_fragment import safe_get_full_grad

    if not contract.has(deepspeed_internals.MARKED_GRADIENT):
        _let_marks_be_looked_for()
    elif _MARK not in safe_get_full_grad.__code__.co_consts:
        raise contract.changed("access to shards", f"safe_get_full_grad() does not look for {_MARK!r}")
    for param in params:
        _intercept(param, hooks)


def _let_marks_be_looked_for() -> None:
    """Make ``safe_get_full_grad()`` look for marks, in this process. Else it returns the local gradient.

    Programs import the function by name, so the function object stays and gets other code.
    """
    from deepspeed.utils.tensor_fragment import safe_get_full_grad

    if patches.is_installed(patches.FULL_GRADIENT):
        return
    code, defaults = safe_get_full_grad.__code__, safe_get_full_grad.__kwdefaults__
    stock = types.FunctionType(safe_get_full_grad.__code__, safe_get_full_grad.__globals__)

    def look(param: Any, *, _stock: Callable[[Any], Any] = stock) -> Any:
        return param.get_full_hp_grad() if "_hp_grad" in param.__dict__ else _stock(param)

    safe_get_full_grad.__code__, safe_get_full_grad.__kwdefaults__ = look.__code__, look.__kwdefaults__

    def undo() -> None:
        safe_get_full_grad.__code__, safe_get_full_grad.__kwdefaults__ = code, defaults

    patches.install(patches.FULL_GRADIENT, undo)


def _intercept(param: Any, hooks: Any) -> None:
    attributes = vars(param)
    if hasattr(param, "ds_id"):
        attributes[_GET] = lambda: hooks.full_gradient(
            param, lambda: param._z3_optimizer.get_fp32_grad_for_param(param)
        )
    else:
        if missing := _STAGE_1_2 - attributes.keys():
            raise contract.changed("access to shards", f"parameters lack {', '.join(sorted(missing))}")
        attributes["_zerosync_stock"] = stock = {name: attributes[name] for name in _STAGE_1_2}

        def set_gradient(value: torch.Tensor) -> None:
            require_numel(value, param.shape)
            hooks.set_full_gradient(param, value)

        def set_value(value: torch.Tensor, optim_state_key: str | None = None) -> None:
            require_numel(value, param.shape)
            hooks.set_full_master(param, value, optim_state_key)
            if optim_state_key is None:
                with torch.no_grad():
                    param.copy_(value.view_as(param))  # a step starts from the present parameters

        attributes[_GET] = lambda: hooks.full_gradient(param, stock[_GET])
        attributes[_SET] = set_gradient
        attributes[_GET_VALUE] = lambda optim_state_key=None: hooks.full_master(param, optim_state_key)
        attributes[_SET_VALUE] = set_value
    attributes[_MARK] = True


def require_numel(value: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ``ValueError`` unless ``value`` has as many elements as a parameter of this ``shape``."""
    if value.numel() != math.prod(shape):
        raise ValueError(
            f"One of DeepSpeed's safe_set_full_...() got a value of shape {tuple(value.shape)} for a parameter of shape"
            f" {tuple(shape)}. Give one of that shape."
        )


def release(params: Iterable[Any]) -> None:
    """Undo :func:`intercept`."""
    for param in params:
        attributes = vars(param)
        del attributes[_MARK], attributes[_GET]
        attributes.update(attributes.pop("_zerosync_stock", {}))
