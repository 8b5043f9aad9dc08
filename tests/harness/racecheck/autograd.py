"""Follows autograd: records the stream on which each node was made, and the streams that use each gradient.

:class:`SimulatedNodes` also runs each node on the stream that torch's engine would choose on a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from tests.harness.racecheck.checker import Clock, Timeline
from tests.harness.racecheck.device import Device, Stream
from tests.harness.racecheck.recorder import Recorder, running

_autograd: Any = torch.autograd  # mypy: torch.autograd does not export _engine_run_backward
_numbers = itertools.count()
_TO_HOST = (torch.Tensor.tolist, torch.Tensor.cpu)  # no operators here, where all memory is the CPU's
_FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.scalar_tensor)


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

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._key = f"zerosync {next(_numbers)}"  # in a node's metadata; unique, because nodes may outlive a recorder
        # Two paths bypass function modes: ``torch.autograd.Function`` and the engine.
        apply, run = vars(_autograd.Function)["apply"], _autograd._engine_run_backward
        follow, backward = self._follow_outputs, self.backward

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            with backward():
                return run(*args, **kwargs)

        followed = classmethod(lambda cls, *args, **kwargs: follow(apply.__func__(cls, *args, **kwargs)))
        recorder.replace(_autograd.Function, "apply", followed)
        recorder.replace(_autograd, "_engine_run_backward", run_backward)

    @property
    def _active(self) -> bool:
        """Whether the recorder runs. Hooks stay on the nodes, and do nothing after it has stopped."""
        return running() is self._recorder

    # Dynamo would compile it for one function, and call that for another.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._call(func, args, kwargs or {})
        # A compiler must not trace the hooks. The outputs of a compiled graph come through Function.apply.
        return out if torch.compiler.is_compiling() else self._follow_outputs(out)

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

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
            if isinstance(tensor, torch.Tensor) and (node := _node_of(tensor)) is not None:
                self._follow(node)
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
            if self._active and gradient is not None and gradient.layout is torch.strided:
                self._recorder.record(gradient, self._recorder.current_timeline)


def _node_of(tensor: torch.Tensor) -> Any:
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view made under no_grad of what was modified in place since: torch differentiates none
        return None


def _on_host(device: Any = None, **_: Any) -> bool:
    """Whether a program that gives this ``device`` means the host: it gives none, or writes "cpu" itself."""
    return device is None or (type(device) is str and device == "cpu")


@dataclass
class _Backward:
    """One call of the engine, possibly nested in a node of another call."""

    caller: Stream
    leaves: list[Timeline] = field(default_factory=list)
    inputs: dict[NodeInfo, list[Clock]] = field(default_factory=dict)  # by node: clocks of its finished predecessors


class SimulatedNodes(Nodes):
    """Runs each node on the stream on which it was made, after the nodes that produce its gradients.

    Leaves do so too: torch makes their nodes at the first use in a forward. When a backward ends, its caller's stream
    waits for the streams of its leaves, before the engine's final callbacks. The caller of a nested backward is the
    node that runs it.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._device = device
        self._backwards: dict[int, _Backward] = {}  # by the engine's graph task id

    @contextmanager
    def backward(self) -> Iterator[None]:
        outer, stream = set(self._backwards), self._device.current
        try:
            with super().backward():
                yield
        except BaseException:
            # The post-hooks and final callbacks of the interrupted backward did not run.
            self._backwards = {task: backward for task, backward in self._backwards.items() if task in outer}
            self._device.current = stream
            raise

    def _hook(self, node: Any, info: NodeInfo) -> None:
        node.register_prehook(lambda gradients: self._enter(info, gradients))
        node.register_hook(lambda _, __: self._exit(info))

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is torch.Tensor.register_hook and args[0].grad_fn is not None:
            args, kwargs = (args[0], self._on_stream_of(args[0].grad_fn, *args[1:], **kwargs)), {}
        if func in _TO_HOST:
            self._device.read_back(args[0], func.__name__)
        if func in _FROM_NUMBERS and not isinstance(args[0], torch.Tensor) and _on_host(**kwargs):
            return self._device.in_host_memory(lambda: func(*args, **kwargs))
        return func(*args, **kwargs)

    def _on_stream_of(self, node: Any, hook: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """Run a tensor's ``hook`` on the stream of its ``node``. The engine calls it before the node's own prehooks."""
        info = node.metadata.get(self._key)

        def on_stream(gradient: torch.Tensor) -> Any:
            if info is None or not self._active:
                return hook(gradient)
            self._wait_for_inputs(info)
            with self._device.stream(info.stream):
                return hook(gradient)

        return on_stream

    def _wait_for_inputs(self, info: NodeInfo) -> _Backward:
        """Make the node's stream wait for the node's predecessors; at the root of a backward, for the caller."""
        task = torch._C._current_graph_task_id()
        if task not in self._backwards:
            self._backwards[task] = _Backward(self._device.current)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._join(task))
        backward = self._backwards[task]
        for clock in backward.inputs.get(info, [Clock(backward.caller.clock)]):
            info.stream.wait(clock)
        return backward

    def _enter(self, info: NodeInfo, gradients: Any) -> None:
        if not self._active:
            return
        backward = self._wait_for_inputs(info)
        backward.inputs.pop(info, None)
        info.callers.append(self._device.current)
        self._device.current = info.stream
        self._record_gradients(gradients)
        if info.is_leaf:
            backward.leaves.append(info.stream)

    def _exit(self, info: NodeInfo) -> None:
        if not info.callers:
            return  # the simulation was inactive at the node's entry
        backward = self._backwards.get(torch._C._current_graph_task_id())
        if backward is not None:
            for successor in info.successors:
                backward.inputs.setdefault(successor, []).append(Clock(info.stream.clock))
        self._device.current = info.callers.pop()

    def _join(self, task: int) -> None:
        backward = self._backwards.pop(task)
        for leaf in backward.leaves:
            backward.caller.wait(leaf.clock)
