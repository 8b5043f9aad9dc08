"""Modes of torch that come and go at any time, not as a block of code.

Torch keeps modes on a stack, and whoever leaves one takes off whatever lies on top. A mode that is put below all others
and taken out from there does not disturb those who come and go in the meantime.
"""

from __future__ import annotations

from typing import Any

from torch import overrides
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch


def put_below(mode: Any) -> None:
    """Let ``mode`` see what all other modes of this thread have left of a call."""
    others = _take_off(mode)
    for other in [mode, *others]:
        _stack_of(mode)._push_mode(other)


def take_out(mode: Any) -> None:
    """Undo :func:`put_below`; nothing if it was undone."""
    for other in _take_off(mode):
        if other is not mode:
            _stack_of(mode)._push_mode(other)


def _stack_of(mode: Any) -> Any:
    return overrides if isinstance(mode, TorchFunctionMode) else _python_dispatch


def _take_off(mode: Any) -> list[Any]:
    """Empty the stack of ``mode``'s kind; what was on it, the lowest first."""
    stack = _stack_of(mode)
    if stack is overrides:
        others = overrides._get_current_function_mode_stack()
    else:
        others = _python_dispatch._get_current_dispatch_mode_stack()
    for _ in others:
        stack._pop_mode()
    return others
