"""Errors for programs that change or read gradients between two backwards, or before the step (N1).

Local gradients are this rank's own, so a change of one would be averaged. A reduced gradient is no longer on its
parameter, where torch would show ``None``, and a program that clips or logs gradients would silently do nothing. So
until the step the parameter has a class whose ``grad`` is a stand-in, which raises when it is used. Autograd does not
see the stand-in, and accumulates as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.engine.parameter import record_of
from zerosync_strategy.core.failures.errors import HANDLE

GET_GRAD: Any = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_SET_GRAD: Any = torch.Tensor.grad.__set__  # type: ignore[union-attr]
_DELETE_GRAD: Any = torch.Tensor.grad.__delete__  # type: ignore[union-attr]
_KEPT = {"requires_grad_", "detach_", "size", "dim", "numel", "is_floating_point"}
"""Methods that a program may call on a stand-in: they use no values."""
OWN = "zerosync_shows_reduced_gradients"
"""An attribute of classes that show stand-ins themselves, as that of a sharded parameter at rest."""


class ReducedGradient(torch.Tensor):
    """Stands in for a gradient that is in the shards."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
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


def stand_in(param: nn.Parameter) -> torch.Tensor:
    """Return the stand-in for the gradient of ``param``, in its full shape: the same object each time."""
    if id(param) not in _stand_ins:
        with zero3.as_it_is():
            shown: torch.Tensor = param.data.new_zeros(()).expand(zero3.full_shape(param))
        _stand_ins[id(param)] = shown.as_subclass(ReducedGradient)
    return _stand_ins[id(param)]


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


def _read(param: nn.Parameter) -> torch.Tensor | None:
    found: torch.Tensor | None = GET_GRAD(param)
    return stand_in(param) if found is None and param.requires_grad else found


def _copy(param: nn.Parameter, memo: dict[int, object]) -> nn.Parameter:
    copied = stock_of[type(param)].__deepcopy__(param, memo)  # type: ignore[attr-defined]
    copied.__class__ = stock_of.get(type(copied), type(copied))
    return copied


showing = _Classes()
stock_of: dict[type, type] = {}
"""By class that shows a stand-in, the class without."""


class LocalChanges:
    """Finds changes to the local gradients between two backwards, or before the step.

    Local gradients are this rank's own. Plain data parallelism would show averages, so a norm or a clamp of them would
    be wrong.

    Attributes:
        gone: a backward has reduced gradients; parameters without one show stand-ins.
    """

    def __init__(self, params: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str]) -> None:
        self._params = list(params)
        self._names = names
        self._seen: list[tuple[nn.Parameter, torch.Tensor, int]] = []
        self._linked = False  # records of sharded parameters know this object
        self.gone = False

    def note(self, reduced: bool) -> None:
        """Record the current gradients and their versions as unchanged.

        ``reduced``: those that are not on their parameters are in the shards; until the next check, using one raises.
        """
        self.show_all()
        with zero3.as_it_is():
            self._seen = [(param, grad, grad._version) for param in self._params if (grad := param.grad) is not None]
            if not reduced:
                return
            self.gone = True
            if not self._linked:
                self._link()
            for param in self._params:
                if param.grad is None:
                    param.__class__ = showing[param.__class__]

    def _link(self) -> None:
        self._linked = True
        for param in filter(zero3.is_sharded, self._params):
            record_of(param).changes = self

    def show_all(self) -> None:
        """Remove all stand-ins, because ZeroSync, autograd or torch.compile is about to look at gradients."""
        if not self.gone:
            return
        self.gone = False
        _stand_ins.clear()
        for param in self._params:
            param.__class__ = stock_of.get(param.__class__, param.__class__)

    def check(self, but: nn.Parameter | None = None) -> None:
        """Raise if a gradient has changed since :meth:`note`, except that of ``but``. It may be set to ``None``."""
        self.show_all()
        seen, self._seen = self._seen, []
        with zero3.as_it_is():
            now_of = [param.grad for param, _, _ in seen]
        for (param, grad, version), now in zip(seen, now_of, strict=True):
            if now is None or param is but:
                continue
            # Views of one buffer share one version counter, which a change of the gradient of `but` has raised.
            is_known = but is None or not now._is_view()
            if now is not grad or (is_known and now._version != version):
                name = repr(self._names.get(param, "a parameter"))
                which = f"{name}, or of a parameter beside it," if now._is_view() else name
                raise RuntimeError(
                    f"The gradient of {which} was changed between backward and step. There it is this rank's own, of"
                    " which the step will take the average; or it is in ZeRO's shards already. Change it inside 'with"
                    " zerosync.full_gradients():', where it is averaged; or inside 'with zerosync.local_gradients():',"
                    f" to change this rank's own before the reduction, which is right for what is linear. ({HANDLE}.)"
                )

    def reset(self) -> None:
        self.show_all()
        self._seen = []
