"""The checks that a program neither changes nor misses gradients of a window by mistake (N1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.engine.parameter import record_of
from zerosync_strategy.core.failures.errors import HANDLE
from zerosync_strategy.core.failures.reduced_gradient import forget_stand_ins, showing, stock_of


class LocalChanges:
    """Finds changes to the local gradients between two backwards, or before the step.

    Local gradients are this rank's own. Plain data parallelism would show averages, so a norm or a clamp of them would
    be wrong.

    Attributes:
        gone: a backward has reduced gradients; to use one that is not on its parameter is an error.
    """

    def __init__(self, params: Iterable[Any], names: Mapping[Any, str]) -> None:
        self._params = list(params)
        self._names = names
        self._seen: list[tuple[Any, torch.Tensor, int]] = []
        self._linked = False  # records of sharded parameters know this object
        self.gone = False

    def note(self, reduced: bool) -> None:
        """Record the current gradients and their versions as correct; ``reduced``: the others are in the shards.

        Until the next check, it is then an error to use one of these.
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
        """Show gradients as they are: where none is used by mistake, or autograd and torch.compile look."""
        if not self.gone:
            return
        self.gone = False
        forget_stand_ins()
        for param in self._params:
            param.__class__ = stock_of[param.__class__]

    def check(self, but: Any = None) -> None:
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
