"""What a program does with the torch optimizer's states by parameter of the module is an error with a remedy (N1).

Under ZeRO a torch optimizer steps flat shards, whose states it keeps. In plain torch the keys of ``optimizer.state``
are the parameters of the module; here they would be unknown, and an edit of their states would be lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NoReturn


class GuardedStates(defaultdict[Any, Any]):
    """The states of a torch optimizer, with ``names`` of the module's parameters, which are no keys of it."""

    def __init__(self, states: Mapping[Any, Any], names: Mapping[Any, str]) -> None:
        super().__init__(dict, states)
        self._names = names

    def __missing__(self, key: Any) -> Any:
        self._check(key)
        return super().__missing__(key)

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(key) or self._check(key)

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(key, default) if key in self else default

    def pop(self, key: Any, *default: Any) -> Any:
        self._check(key)
        return super().pop(key, *default)

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))

    def _check(self, key: Any) -> bool:
        if key in self._names:
            _refuse(self._names[key])
        return False

    def check(self) -> None:
        """Raise ``RuntimeError`` if the program has set states of a parameter."""
        for key in self:
            self._check(key)


def guard_states(optimizer: Any, names: Mapping[Any, str]) -> None:
    """Make a use of ``optimizer.state`` by parameter a ``RuntimeError``, also of what was set so far."""
    if not isinstance(optimizer.state, GuardedStates):  # a load has replaced it
        optimizer.state = GuardedStates(optimizer.state, names)
    optimizer.state.check()


def unguard_states(optimizer: Any) -> None:
    """Undo :func:`guard_states`."""
    if isinstance(optimizer.state, GuardedStates):
        optimizer.state = defaultdict(dict, optimizer.state)


def _refuse(name: str) -> NoReturn:
    raise RuntimeError(
        f"optimizer.state was asked for parameter {name!r}. Under ZeRO the optimizer has the states of shards, by flat"
        " tensors of its own. Read and change those of a parameter with safe_get_full_optimizer_state(param, key) and"
        " safe_set_full_optimizer_state(param, value, key) of deepspeed.utils, on all ranks; change those of all in"
        " place: for state in optimizer.state.values()."
    )
