"""``"ignore_unused_parameters": false`` of DeepSpeed: a step without the gradient of some parameter is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zerosync_strategy.core.optimizer.supported import listed


class RequiredGradients:
    """Which parameters have had a gradient in this window.

    Args:
        params: of the optimizer.
        names: of them.
        gradient_ready: the window's.
    """

    def __init__(self, params: Sequence[Any], names: Mapping[Any, str], gradient_ready: Callable[[Any], None]) -> None:
        self._params = params
        self._names = names
        self._gradient_ready = gradient_ready
        self._found: set[Any] = set()

    def gradient_ready(self, param: Any) -> None:
        """Autograd has added to ``param.grad``."""
        self._found.add(param)
        self._gradient_ready(param)

    def forget(self) -> None:
        """The gradients of this window are dropped."""
        self._found = set()

    def check(self) -> None:
        """Before a step, which ends the window.

        Raises:
            RuntimeError: a trainable parameter has had no gradient.
        """
        found, self._found = self._found, set()
        names = [repr(self._names[param]) for param in self._params if param.requires_grad and param not in found]
        if names:
            raise RuntimeError(
                f"step() found no gradient of {listed(names)} since the last step, and the configuration"
                " has 'zero_optimization.ignore_unused_parameters' = false. Use every trainable parameter in the loss,"
                " freeze those that are not used, or leave the option out: they are then stepped with gradient zero."
            )
