"""What a program finds for a gradient that the window has reduced: whatever it does with that is an error (N1).

Such a gradient is not on its parameter, where torch would show ``None``, and a program that clips or logs gradients
would do nothing. So between the backward and the step the parameter has a class whose ``grad`` is a stand-in. Autograd
does not see it, and accumulates as ever.
"""

from __future__ import annotations

from typing import Any

import torch

from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.failures.errors import HANDLE

GET_GRAD: Any = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_SET_GRAD: Any = torch.Tensor.grad.__set__  # type: ignore[union-attr]
_DELETE_GRAD: Any = torch.Tensor.grad.__delete__  # type: ignore[union-attr]
_KEPT = {"requires_grad_", "detach_", "size", "dim", "numel", "is_floating_point"}
"""Methods that a program may call on a stand-in: they use no values."""
OWN = "zerosync_shows_reduced_gradients"
"""Attribute of a parameter's class that shows stand-ins itself, as that of a sharded parameter at rest."""


class ReducedGradient(torch.Tensor):
    """In place of a gradient that is in the shards."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _KEPT or name == "__get__":
            with zero3.as_it_is():
                result = func(*args, **(kwargs or {}))
            if result is args[0] or not isinstance(result, torch.Tensor):
                return result
        raise RuntimeError(
            "A gradient was used between backward and step, and it has been reduced already, into ZeRO's shards. Use it"
            " inside 'with zerosync.full_gradients():', where it is the average of all ranks; or pass"
            f" overlap_last=False, with which it is this rank's own until the step. ({HANDLE}.)"
        )


_stand_ins: dict[int, torch.Tensor] = {}  # by the id of the parameter, until the next window of some engine


def stand_in(param: Any) -> torch.Tensor:
    """Return what stands for the gradient of ``param``, in its full shape: the same one each time."""
    if id(param) not in _stand_ins:
        with zero3.as_it_is():
            shown: torch.Tensor = param.data.new_zeros(()).expand(zero3.full_shape(param))
        _stand_ins[id(param)] = shown.as_subclass(ReducedGradient)
    return _stand_ins[id(param)]


def forget_stand_ins() -> None:
    """Forget the stand-ins of all parameters."""
    _stand_ins.clear()


class _Classes(dict[type, type]):
    """By class of a parameter, the class that shows a stand-in."""

    def __missing__(self, stock: type) -> type:
        shows: type = stock
        if not hasattr(stock, OWN):
            members = {"grad": property(_read, _SET_GRAD, _DELETE_GRAD), "__deepcopy__": _copy, OWN: True}
            shows = type(stock.__name__, (stock,), members)
            stock_of[shows] = stock
        self[stock] = shows
        return shows


class _Stock(dict[type, type]):
    """By class of a parameter, the class without a stand-in."""

    def __missing__(self, shows: type) -> type:
        return shows


def _read(param: Any) -> torch.Tensor | None:
    found: torch.Tensor | None = GET_GRAD(param)
    return stand_in(param) if found is None and param.requires_grad else found


def _copy(param: Any, memo: dict[int, Any]) -> Any:
    copied = stock_of[type(param)].__deepcopy__(param, memo)  # type: ignore[attr-defined]
    copied.__class__ = stock_of[type(copied)]
    return copied


showing, stock_of = _Classes(), _Stock()
