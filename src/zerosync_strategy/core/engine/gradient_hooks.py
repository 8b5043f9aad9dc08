"""The hooks on the gradients of one ZeRO optimizer: ours, which replace DeepSpeed's.

A program may register hooks on a parameter's gradient at any time, for example to mask or log it. The gradient that
they leave is the one to reduce, so ours must run last. PyTorch runs the hooks of a tensor in the order of a dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class GradientHooks:
    """One hook on each of ``params``, until :meth:`remove`, in place of DeepSpeed's on parameters and leaf modules."""

    def __init__(self, optimizer: Any, hooks: Iterable[tuple[Any, Callable[[Any], None]]]) -> None:
        stock = [*optimizer._grad_acc_hooks, *getattr(optimizer, "_leaf_module_hooks", ())]
        self._stock = [
            (of, handle.id, of.pop(handle.id)) for handle in stock if handle.id in (of := handle.hooks_dict_ref() or {})
        ]
        self._handles = [_register(param, hook) for param, hook in hooks]
        self._of_params = [(handle.id, handle.hooks_dict_ref()) for handle in self._handles]
        self._dicts = [of for _, of in self._of_params]
        self._orders: list[tuple[int, ...]] = []  # after the last run_last()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for of, key, hook in self._stock:
            of[key] = hook

    def run_last(self) -> bool:
        """Make these hooks run after all hooks of the program from now on; return whether some did not."""
        if list(map(tuple, self._dicts)) == self._orders:  # three calls for all parameters
            return False
        moved = False
        for own_key, of in self._of_params:
            own = [key for key, hook in of.items() if key == own_key or _is_ours(hook)]
            if list(of)[-len(own) :] != own:
                moved = True
                for key in own:  # C reads the order of insertion, which OrderedDict.move_to_end() does not change
                    of[key] = of.pop(key)
        self._orders = list(map(tuple, self._dicts))
        return moved


def _register(param: Any, hook: Callable[[Any], None]) -> Any:
    requires_grad = param.requires_grad  # it may be frozen for a while
    param.requires_grad_(True)
    handle = param.register_post_accumulate_grad_hook(hook)
    param.requires_grad_(requires_grad)
    return handle


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("zerosync_strategy.")
