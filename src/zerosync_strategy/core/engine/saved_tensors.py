"""What autograd saves in a forward shows that a backward has come to it, whatever way the backward takes.

Hooks on a unit's outputs (``params/unit_hooks.py``) see a backward that comes through an output. But tensors may leave
a unit beside its outputs: a loss that it keeps as an attribute, keys in a cache, what a forward hook of the program has
caught. A backward may reach these first, or alone. Hooks on saved tensors see that, too, but cost two calls for each
saved tensor. So they are used only

- in the first steps, unless the model is compiled: its graphs would be compiled again when that ends;
- from then on, if a backward has come to a unit by a saved tensor first, or a unit has made nodes of the graph after
  the last of its outputs. Autograd runs the nodes of a graph in the reverse of the order in which they were made, so
  that it reaches an output first, unless there are such nodes or the loss does not depend on the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import graph

from zerosync_strategy.core.engine import compilation, patches
from zerosync_strategy.core.engine.interpose import replaced

FIRST_STEPS = 2

_autograd: Any = torch._C._autograd  # torch's stubs lack some of it
nodes_made = _autograd._get_sequence_nr
"""Return how many nodes of graphs this thread has made."""


class SavedTensorHooks:
    """Decides whether forwards of ``root`` have hooks on what autograd saves.

    Attributes:
        is_used: they have.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root, self.is_used, self._is_needed = root, True, False

    def need(self) -> None:
        """Use them from now on."""
        self.is_used = self._is_needed = True

    def forward_begins(self) -> None:
        if self.is_used and not self._is_needed and compilation.is_compiled(self._root):
            self.is_used = False

    def stepped(self, steps: int) -> None:
        """Record that the program has made ``steps`` steps."""
        self.is_used = self._is_needed or (self.is_used and steps < FIRST_STEPS)


def hooked(unpacks: Callable[[], None]) -> ExitStack | None:
    """Call ``unpacks`` before autograd uses what it saves until the returned stack is closed.

    Return ``None``, without hooks, if the program has such hooks of its own, in whose place ours would be.
    """
    hooks = _autograd._top_saved_tensors_default_hooks(False)
    if not _autograd._saved_tensors_hooks_is_enabled() or (hooks is not None and hooks[0] is not _pack):
        return None

    def unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
        unpacks()
        tensor, version = packed
        if tensor._version != version:  # torch does not look where there are hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" {tensor.dtype} of {list(tensor.shape)} is at version {tensor._version}; expected version {version}"
                " instead."
            )
        return tensor

    stack = ExitStack()
    stack.enter_context(graph.saved_tensors_hooks(_pack, unpack))
    stack.enter_context(replaced(graph, patches.SAVED_TENSORS.name, _without_ours(graph.disable_saved_tensors_hooks)))
    return stack


def _pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    return tensor, tensor._version


def _without_ours(stock: Any) -> Any:
    """Return a replacement of ``disable_saved_tensors_hooks``, by which transforms of torch.func refuse any hooks."""

    @contextmanager
    def disabled(*args: Any, **kwargs: Any) -> Iterator[None]:
        ours = []
        while (hooks := _autograd._top_saved_tensors_default_hooks(False)) is not None and hooks[0] is _pack:
            ours.append(hooks)
            _autograd._pop_saved_tensors_default_hooks()
        try:
            with stock(*args, **kwargs):
                yield
        finally:
            for hooks in reversed(ours):
                _autograd._push_saved_tensors_default_hooks(*hooks)

    return disabled


def hookable(output: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose hooks see the gradient of ``output``, even if the program changes that in place.

    A view gets another node in the graph then, while the node of its base stays.
    """
    base = output._base
    return output if base is None or base.grad_fn is None else base
