"""The checks that a program neither changes nor misses gradients of a window by mistake (N1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.failures.errors import HANDLE

_KEPT = {"requires_grad_", "detach_", "size", "dim", "numel", "is_floating_point"}
"""Methods that a program may call on what stands for a gradient that has gone: they use no values."""


class _Reduced(torch.Tensor):
    """In place of a gradient that the window has reduced: whatever a program does with it is an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _KEPT or name == "__get__":
            with zero3.as_it_is():
                result = func(*args, **(kwargs or {}))
            if result is args[0] or not isinstance(result, torch.Tensor):
                return result
        raise RuntimeError(
            "The gradient of a parameter in optimizer.param_groups was used between backward and step, and it has been"
            " reduced already, into ZeRO's shards. Use it inside 'with zerosync.full_gradients():', where it is the"
            f" average of all ranks. ({HANDLE}.)"
        )


class LocalChanges:
    """Finds changes to the local gradients between two backwards, or before the step.

    Local gradients are this rank's own. Plain data parallelism would show averages, so a norm or a clamp of them would
    be wrong.
    """

    def __init__(self, params: Iterable[Any], names: Mapping[Any, str]) -> None:
        self._params = list(params)
        self._names = names
        self._seen: list[tuple[Any, torch.Tensor, int]] = []
        self._marked: list[Any] = []

    def mark(self) -> None:
        """Until the next check, make it an error to use a gradient that has gone from its parameter."""
        self._unmark()
        with zero3.as_it_is():
            self._marked = [param for param in self._params if param.requires_grad and param.grad is None]
            with zero3.in_full_shapes(self._marked):
                for param in self._marked:
                    param.grad = param.new_zeros(()).expand(param.shape).as_subclass(_Reduced)

    def _unmark(self) -> None:
        with zero3.as_it_is():
            for param in self._marked:
                if isinstance(param.grad, _Reduced):
                    param.grad = None
        self._marked = []

    def note(self) -> None:
        """Record the current gradients and their versions as correct."""
        self._unmark()
        with zero3.as_it_is():
            self._seen = [(param, grad, grad._version) for param in self._params if (grad := param.grad) is not None]

    def check(self, but: Any = None) -> None:
        """Raise if a gradient has changed since :meth:`note`, except that of ``but``. It may be set to ``None``."""
        self._unmark()
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
        self._unmark()
        self._seen = []
