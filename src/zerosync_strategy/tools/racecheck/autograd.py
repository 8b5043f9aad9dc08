"""Follows autograd: records the stream on which each node was made, and the streams that use each gradient."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from zerosync_strategy.tools.racecheck.clocks import Timeline

_autograd: Any = torch.autograd  # mypy: torch.autograd does not export _engine_run_backward
_numbers = itertools.count()


class StreamUses(Protocol):
    """The part of a recorder that the nodes use."""

    @property
    def current_timeline(self) -> Timeline:
        """The current stream."""

    def record(self, tensor: torch.Tensor, timeline: Timeline) -> None:
        """Record that ``timeline`` uses the memory of ``tensor``."""


@dataclass(eq=False)
class NodeInfo:
    """Facts about an autograd node. Neither it nor a hook may refer to a node: that would keep the graph alive.

    Attributes:
        stream: the stream that was current when the node was made.
        is_leaf: whether the node accumulates the gradient of a leaf.
        successors: the nodes that receive this node's gradients.
        callers: a stack of streams; each entry into the node pushes the stream that was current before it.
    """

    stream: Any
    is_leaf: bool
    successors: list[NodeInfo] = field(default_factory=list)
    callers: list[Any] = field(default_factory=list)


class Nodes(TorchFunctionMode):
    """Hooks every autograd node when it is made, and records the gradients that it receives.

    If a node runs on another stream than the one that allocated its gradient, the engine keeps the gradient alive for
    the node's stream. No operator shows that, so the hook records it.
    """

    def __init__(self, recorder: StreamUses) -> None:
        super().__init__()
        self._recorder = recorder
        self._key = f"zerosync {next(_numbers)}"  # in a node's metadata; unique, because nodes may outlive a recorder
        self._stock: tuple[Any, Any] = (None, None)
        self._active = False

    def start(self) -> None:
        """Patch the two paths that bypass function modes: ``torch.autograd.Function`` and the engine."""
        self._active = True
        apply, run = self._stock = vars(_autograd.Function)["apply"], _autograd._engine_run_backward
        follow, backward = self._follow_outputs, self.backward

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            with backward():
                return run(*args, **kwargs)

        _autograd.Function.apply = classmethod(
            lambda cls, *args, **kwargs: follow(apply.__func__(cls, *args, **kwargs))
        )
        _autograd._engine_run_backward = run_backward

    def stop(self) -> None:
        """Undo :meth:`start`. Hooks stay on the nodes and do nothing any more."""
        self._active = False
        _autograd.Function.apply, _autograd._engine_run_backward = self._stock

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # A compiler must not trace the hooks. The outputs of a compiled graph come through Function.apply.
        return out if torch.compiler.is_compiling() else self._follow_outputs(out)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Wrap a backward: keep this mode on, since hooks may make nodes and ``Tensor.backward`` has popped it."""
        if self in _get_current_function_mode_stack():
            yield
        else:
            with self:
                yield

    def _follow_outputs(self, out: Any) -> Any:
        for tensor in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                self._follow(tensor.grad_fn)
        return out

    def _follow(self, node: Any) -> None:
        """Hook ``node``, which is new, and those of its successors that no function call has returned."""
        stream = self._recorder.current_timeline
        pending = [] if self._key in node.metadata else [node]
        node.metadata.setdefault(self._key, NodeInfo(stream, hasattr(node, "variable")))
        while pending:
            node = pending.pop()
            info = node.metadata[self._key]
            for successor, _ in node.next_functions:
                if successor is None:
                    continue
                if self._key not in successor.metadata:
                    successor.metadata[self._key] = NodeInfo(stream, hasattr(successor, "variable"))
                    pending.append(successor)
                info.successors.append(successor.metadata[self._key])
            self._hook(node, info)

    def _hook(self, node: Any, info: NodeInfo) -> None:
        node.register_prehook(self._record_gradients)

    def _record_gradients(self, gradients: Any) -> None:
        for gradient in gradients:
            if self._active and gradient is not None:
                self._recorder.record(gradient, self._recorder.current_timeline)
