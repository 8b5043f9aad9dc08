"""Torch modes that are entered and exited at any time, not as a ``with`` block.

Torch keeps modes on a stack, and exiting a mode pops the top of it. A mode at the bottom of the stack is never on top
when another one exits, so that any order of entries and exits is safe.
"""

from __future__ import annotations

from typing import Any

from torch import overrides
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch


def put_below(mode: Any) -> None:
    """Enter ``mode`` at the bottom of this thread's stack, where it sees calls after all other modes."""
    others = _take_off(mode)
    for other in [mode, *others]:
        _stack_of(mode)._push_mode(other)


def take_out(mode: Any) -> None:
    """Exit ``mode``, wherever it is on the stack. Does nothing if it is not there."""
    for other in _take_off(mode):
        if other is not mode:
            _stack_of(mode)._push_mode(other)


def _stack_of(mode: Any) -> Any:
    return overrides if isinstance(mode, TorchFunctionMode) else _python_dispatch


def _take_off(mode: Any) -> list[Any]:
    """Pop all modes from the stack of ``mode``'s kind, and return them from the bottom to the top."""
    stack = _stack_of(mode)
    if stack is overrides:
        others = overrides._get_current_function_mode_stack()
    else:
        others = _python_dispatch._get_current_dispatch_mode_stack()
    for _ in others:
        stack._pop_mode()
    return others
