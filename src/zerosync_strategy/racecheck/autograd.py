"""On which stream each node of a backward runs, as torch's engine does it on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from zerosync_strategy.racecheck.clocks import Clock, Timeline

if TYPE_CHECKING:
    from zerosync_strategy.racecheck.recorder import Recorder
    from zerosync_strategy.racecheck.simulation import Simulation, Stream

_autograd: Any = torch.autograd  # whose engine is called by a name that it does not export
_numbers = itertools.count()


@dataclass(eq=False)
class Made:
    """What is known of a node. It refers to no node, nor does a node's hook: that would keep the graph alive.

    Attributes:
        stream: the current one when it was made.
        feeds: of the nodes that it passes gradients to.
        left: the streams that were current when it was entered and not left yet.
    """

    stream: Any
    leaf: bool
    feeds: list[Made] = field(default_factory=list)
    left: list[Any] = field(default_factory=list)


class Nodes(TorchFunctionMode):
    """Sees each node of autograd when it is made, and gradients when they come to it.

    The engine keeps a gradient alive for a node that runs on another stream than it was allocated on; no operator shows
    that, so it is said here.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._key = f"zerosync {next(_numbers)}"  # in a node's metadata; nodes may outlive a recorder
        self._stock: tuple[Any, Any] = (None, None)
        self._active = False

    def start(self) -> None:
        """See also what goes past function modes: ``torch.autograd.Function``, and the engine itself."""
        self._active = True
        apply, run = self._stock = vars(_autograd.Function)["apply"], _autograd._engine_run_backward
        made, backward = self._made, self.backward

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            with backward():
                return run(*args, **kwargs)

        _autograd.Function.apply = classmethod(lambda cls, *args, **kwargs: made(apply.__func__(cls, *args, **kwargs)))
        _autograd._engine_run_backward = run_backward

    def stop(self) -> None:
        """Nodes that are hooked already say nothing any more."""
        self._active = False
        _autograd.Function.apply, _autograd._engine_run_backward = self._stock

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # A compiler that traces this must find nothing to trace; what it compiled comes through Function.apply.
        return out if torch.compiler.is_compiling() else self._made(out)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward, whose hooks may make nodes too; ``Tensor.backward`` has taken the mode off."""
        if self in _get_current_function_mode_stack():
            yield
        else:
            with self:
                yield

    def _made(self, out: Any) -> Any:
        for tensor in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                self._follow(tensor.grad_fn)
        return out

    def _follow(self, node: Any) -> None:
        """Hook ``node``, which was just made, and what it leads to that no function call has shown."""
        stream = self._recorder.stream_in_use
        todo = [] if self._key in node.metadata else [node]
        node.metadata.setdefault(self._key, Made(stream, hasattr(node, "variable")))
        while todo:
            node = todo.pop()
            made = node.metadata[self._key]
            for next_node, _ in node.next_functions:
                if next_node is None:
                    continue
                if self._key not in next_node.metadata:
                    next_node.metadata[self._key] = Made(stream, hasattr(next_node, "variable"))
                    todo.append(next_node)
                made.feeds.append(next_node.metadata[self._key])
            self._hook(node, made)

    def _hook(self, node: Any, made: Made) -> None:
        node.register_prehook(self._keep)

    def _keep(self, gradients: Any) -> None:
        for gradient in gradients:
            if self._active and gradient is not None:
                self._recorder.record(gradient, self._recorder.stream_in_use)


@dataclass
class _Backward:
    """One call of the engine, possibly inside a node of another."""

    caller: Stream
    leaves: list[Timeline] = field(default_factory=list)
    incoming: dict[Made, list[Clock]] = field(default_factory=dict)  # by node: what fed it


class SimulatedNodes(Nodes):
    """Lets a node run on the stream on which it was made, after the nodes that feed it.

    So do leaves, whose nodes torch makes at their first use in a forward. When a backward ends, the streams of its
    leaves are joined with the stream that called it, before the engine's final callbacks; one that runs inside a node
    of another is joined with that node's.
    """

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self._simulation = simulation
        self._backwards: dict[int, _Backward] = {}  # by the engine's number of it

    @contextmanager
    def backward(self) -> Iterator[None]:
        running, stream = set(self._backwards), self._simulation.current
        try:
            with super().backward():
                yield
        except BaseException:
            # The hooks after the node that raised did not run.
            self._backwards = {n: of for n, of in self._backwards.items() if n in running}
            self._simulation.current = stream
            raise

    def _hook(self, node: Any, made: Made) -> None:
        node.register_prehook(lambda gradients: self._enter(made, gradients))
        node.register_hook(lambda _, __: self._leave(made))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.register_hook and args[0].grad_fn is not None:
            args = (args[0], self._on_its_stream(args[0].grad_fn, *args[1:], **(kwargs or {})))
            kwargs = None
        return super().__torch_function__(func, types, args, kwargs)

    def _on_its_stream(self, node: Any, hook: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """A tensor's hook runs before those of its node, by which a node is entered."""
        made = node.metadata.get(self._key)

        def on_its_stream(gradient: torch.Tensor) -> Any:
            if made is None or not self._active:
                return hook(gradient)
            self._arrive(made)
            with self._simulation.stream(made.stream):
                return hook(gradient)

        return on_its_stream

    def _arrive(self, made: Made) -> _Backward:
        """Let the stream of a node wait for what feeds it: other nodes, or for the root of a backward the caller."""
        number = torch._C._current_graph_task_id()
        if number not in self._backwards:
            self._backwards[number] = _Backward(self._simulation.current)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._join(number))
        backward = self._backwards[number]
        for clock in backward.incoming.get(made, [Clock(backward.caller.clock)]):
            made.stream.wait(clock)
        return backward

    def _enter(self, made: Made, gradients: Any) -> None:
        if not self._active:
            return
        backward = self._arrive(made)
        backward.incoming.pop(made, None)
        made.left.append(self._simulation.current)
        self._simulation.current = made.stream
        self._keep(gradients)
        if made.leaf:
            backward.leaves.append(made.stream)

    def _leave(self, made: Made) -> None:
        if not made.left:
            return  # entered before the simulation began
        backward = self._backwards.get(torch._C._current_graph_task_id())
        if backward is not None:
            for fed in made.feeds:
                backward.incoming.setdefault(fed, []).append(Clock(made.stream.clock))
        self._simulation.current = made.left.pop()

    def _join(self, number: int) -> None:
        backward = self._backwards.pop(number)
        for leaf in backward.leaves:
            backward.caller.wait(leaf.clock)
