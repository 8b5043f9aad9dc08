"""DeepCompile: its graphs gather and release parameters, and the window reduces their gradients (rule E2).

DeepCompile writes ZeRO's collectives into the graphs that it compiles. In these, every backward reduces its gradients,
regardless of the window. Gradients from eager frames are lost, because DeepSpeed 0.19.8 removes the hooks that would
reduce them. So a pass of ours runs last at each step of DeepCompile's schedule. It replaces each reduction by
``zerosync::collect``, which adds the gradient to the window. Gradients of eager frames reach the window by our hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count

import torch

from zerosync_strategy.core.engine import compilation
from zerosync_strategy.core.gradients.buckets import LocalGradient
from zerosync_strategy.core.options import ZeroSyncConfig

_numbers = count()
_engines: weakref.WeakValueDictionary[int, CompiledGradients] = weakref.WeakValueDictionary()


class CompiledGradients:
    """Adds the gradients that the compiled graphs of one engine compute to the window.

    Args:
        gradients: by the id of their parameters in DeepCompile's graphs.
        add: called with a gradient and the full tensor to add, in any dtype, whose memory the graph keeps.
    """

    def __init__(self, gradients: dict[int, LocalGradient], add: Callable[[LocalGradient, torch.Tensor], None]) -> None:
        self._gradients, self._add = gradients, add
        self._number = next(_numbers)
        _engines[self._number] = self

    @staticmethod
    def verify(config: ZeroSyncConfig, over_groups: bool) -> None:
        """Raise a ``ValueError`` where DeepCompile cannot compile an engine with these options."""
        for found, what in (
            (config.parameters.keeps_any, "'param_memory_budget': it chooses by itself what stays gathered"),
            (not config.eager_frames, "'eager_frames' = false: it takes away what gathers for eager frames"),
            (over_groups, "shard_over(): it gathers every parameter over all ranks"),
        ):
            if found:
                raise ValueError(
                    f"engine.compile() with DeepCompile cannot be combined with {what}. Leave out one of them."
                )

    def compiling(self) -> AbstractContextManager[None]:
        return compilation.deepcompile_last_pass(self._collect_gradients)

    def receive(self, param: int, gradient: torch.Tensor) -> None:
        if param in self._gradients:  # else the optimizer does not train it
            self._add(self._gradients[param], gradient)

    def _collect_gradients(self, module: torch.fx.GraphModule, *_: object) -> None:
        # Changed in place: if a pass returns a graph, DeepCompile runs the graph once more to measure its memory.
        reductions = module.graph.find_nodes(op="call_function", target=torch.ops.dc.reduce_grad.default)
        for node in reductions:
            gradient, _, param = node.args
            node.target, node.args = torch.ops.zerosync.collect.default, (gradient, self._number, param)
        if reductions:
            module.graph.lint()
            module.recompile()


def _collect(gradient: torch.Tensor, engine: int, param: int) -> torch.Tensor:
    _engines[engine].receive(param, gradient)
    return gradient.new_empty(0)


# It returns a tensor because the node that DeepCompile adds at the end of a backward takes one from each reduction;
# that use keeps the operator in the graph.
torch.library.define("zerosync::collect", "(Tensor gradient, int engine, int param) -> Tensor")
torch.library.impl("zerosync::collect", "default", _collect)
torch.library.register_fake("zerosync::collect", lambda gradient, engine, param: gradient.new_empty(0))
