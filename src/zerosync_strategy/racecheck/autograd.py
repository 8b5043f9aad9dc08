"""On which stream each node of a backward runs, as torch's engine does it on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from zerosync_strategy.racecheck.clocks import Clock

if TYPE_CHECKING:
    from zerosync_strategy.racecheck.simulation import Simulation, Stream


class AutogradStreams(TorchFunctionMode):
    """Lets a node run on the stream that was current in its forward, after the nodes that feed it.

    A leaf's gradient is accumulated on the stream of the node that made it. When a backward ends, the streams of its
    leaves are joined with the stream that called it, before the engine's final callbacks.
    """

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation
        self._incoming: dict[Any, list[tuple[Clock, Stream]]] = {}
        self._caller: Stream | None = None  # of the backward that runs
        self._leaves: list[Stream] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._made(func(*args, **(kwargs or {})))

    def __enter__(self) -> AutogradStreams:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._apply = vars(torch.autograd.Function)["apply"]  # a call that no function mode sees
        stock = self._apply.__func__
        made = self._made
        torch.autograd.Function.apply = classmethod(  # type: ignore[assignment]
            lambda cls, *args, **kwargs: made(stock(cls, *args, **kwargs))
        )
        return self

    def __exit__(self, *exception: Any) -> None:
        torch.autograd.Function.apply = self._apply  # type: ignore[method-assign]
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def _made(self, out: Any) -> Any:
        for tensor in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                self._follow(tensor.grad_fn, self._simulation.current)
        return out

    def _follow(self, node: Any, stream: Stream) -> None:
        """Hook ``node``, made on ``stream``, and what it leads to that no function call has shown."""
        todo = [node]
        while todo:
            node = todo.pop()
            if node is None or node.metadata.get("zerosync_stream"):
                continue
            node.metadata["zerosync_stream"] = stream
            leaf = hasattr(node, "variable")
            entered: list[Stream] = []
            node.register_prehook(lambda grads, node=node, leaf=leaf, on=entered: self._enter(node, leaf, on, grads))
            node.register_hook(lambda _, __, node=node, entered=entered: self._leave(node, entered))
            todo += [next_node for next_node, _ in node.next_functions]

    def _enter(self, node: Any, leaf: bool, entered: list[Stream], gradients: Any) -> None:
        incoming = self._incoming.pop(node, [])
        stream = incoming[0][1] if leaf and incoming else node.metadata["zerosync_stream"]
        if not incoming:  # the root of a backward: the engine lets it wait for the caller
            incoming = [(Clock(self._simulation.current.clock), self._simulation.current)]
        for clock, _ in incoming:
            stream.wait(clock)
        for gradient in gradients:
            if gradient is not None:
                self._simulation.record_stream(gradient, stream)
        if leaf:
            self._leaves.append(stream)
        if self._caller is None:
            self._caller = self._simulation.current
            torch.autograd.Variable._execution_engine.queue_callback(self._join)
        entered.append(self._simulation.current)
        self._simulation.current = stream

    def _leave(self, node: Any, entered: list[Stream]) -> None:
        stream = self._simulation.current
        for next_node, _ in node.next_functions:
            if next_node is not None:
                self._incoming.setdefault(next_node, []).append((Clock(stream.clock), stream))
        self._simulation.current = entered.pop()

    def _join(self) -> None:
        assert self._caller is not None
        for leaf in self._leaves:
            self._caller.wait(leaf.clock)
        self._caller = None
        self._leaves.clear()
        self._incoming.clear()
