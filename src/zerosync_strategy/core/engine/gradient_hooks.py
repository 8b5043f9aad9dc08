"""The hooks by which DeepSpeed's optimizer learns of each gradient, after those that the program has on it.

A program may register hooks on a parameter's gradient at any time, as to mask or to log it. What they leave is what is
reduced. PyTorch runs the hooks of a tensor in the order of its dictionary of them, of which DeepSpeed's is one.
"""

from __future__ import annotations

from typing import Any


class GradientHooks:
    """The hooks of one ZeRO optimizer, one for each parameter. Leaf modules have none, and reduce when all is done."""

    def __init__(self, optimizer: Any) -> None:
        of_params = [(handle.id, handle.hooks_dict_ref()) for handle in optimizer._grad_acc_hooks]
        self._of_params = [(key, hooks) for key, hooks in of_params if hooks is not None]
        self._dicts = [hooks for _, hooks in self._of_params]
        self._orders: list[tuple[int, ...]] = []  # in which they were left

    def run_last(self) -> bool:
        """Let them run after all hooks of the program, in backwards from here on; return whether some did not."""
        if list(map(tuple, self._dicts)) == self._orders:  # for all parameters by three calls
            return False
        moved = False
        for own_key, hooks in self._of_params:
            own = [key for key, hook in hooks.items() if key == own_key or _is_ours(hook)]
            if list(hooks)[-len(own) :] != own:
                moved = True
                for key in own:  # C reads the order of insertion, which an OrderedDict's move_to_end() leaves as it is
                    hooks[key] = hooks.pop(key)
        self._orders = list(map(tuple, self._dicts))
        return moved


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("zerosync_strategy.")
