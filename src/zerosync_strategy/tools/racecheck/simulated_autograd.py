"""Runs each node of a backward on the stream that torch's engine would choose on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from zerosync_strategy.tools.racecheck.autograd import NodeInfo, Nodes
from zerosync_strategy.tools.racecheck.clocks import Clock, Timeline
from zerosync_strategy.tools.racecheck.device import Device, Stream

_TO_HOST = (torch.Tensor.tolist, torch.Tensor.cpu)  # no operators here, where all memory is the CPU's
_FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.scalar_tensor)


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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.register_hook and args[0].grad_fn is not None:
            args = (args[0], self._on_stream_of(args[0].grad_fn, *args[1:], **(kwargs or {})))
            kwargs = None
        if func in _TO_HOST and not self._device.is_host_memory(args[0]):
            self._device.host_waits_for(self._device.current.clock, func.__name__)
        if func in _FROM_NUMBERS and not isinstance(args[0], torch.Tensor) and _on_host(**(kwargs or {})):
            return self._device.in_host_memory(lambda: func(*args, **(kwargs or {})))
        return super().__torch_function__(func, types, args, kwargs)

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
