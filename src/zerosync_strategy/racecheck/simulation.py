"""Streams, events and collectives on CPU, simulated: torch computes as always, and the checker is told what would be
asynchronous on a GPU.

What is simulated is CUDA's and NCCL's contract, not one run of it:

- an operation is issued to the current stream, and runs there in order; one on host memory alone runs on the host;
- a stream or an event is complete (``query()``) only if the host knows it, whatever a device would have done by now;
- an operator that reads a value back (``.item()``) makes the host wait for the current stream;
- a collective runs on a stream of its process group, after what the current stream had when it was called; a
  synchronous one, or ``wait()`` on its work, makes the current stream wait for it. The backend keeps its tensors alive;
- backward runs each node on the stream of its forward, waits for the nodes that feed it, and joins the streams of the
  leaves with the caller's before its final callbacks;
- the allocator gives freed memory to the next allocation on the same stream, whatever other streams still do with it.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from zerosync_strategy.racecheck.autograd import AutogradStreams
from zerosync_strategy.racecheck.checker import Block, Checker, Finding, Operation
from zerosync_strategy.racecheck.clocks import Clock, Timeline

# Collectives by name: the parameters that they write, and those that they read.
_COLLECTIVES = {
    "all_reduce": (("tensor",), ("tensor",)),
    "broadcast": (("tensor",), ("tensor",)),
    "reduce": (("tensor",), ("tensor",)),
    "all_gather": (("tensor_list",), ("tensor",)),
    "all_gather_into_tensor": (("output_tensor",), ("input_tensor",)),
    "all_gather_single": (("output_tensor",), ("input_tensor",)),
    "reduce_scatter": (("output",), ("input_list",)),
    "reduce_scatter_tensor": (("output",), ("input",)),
    "reduce_scatter_single": (("output",), ("input",)),
    "all_to_all_single": (("output",), ("input",)),
    "all_to_all": (("output_tensor_list",), ("input_tensor_list",)),
    "isend": ((), ("tensor",)),
    "irecv": (("tensor",), ()),
}
# Operators that only allocate, and those that read a value back to the host.
_ALLOCATES = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
_READS_BACK = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "_unique2"}
_TOUCHES_NOTHING = {"record_stream", "set_", "resize_", "is_same_size", "is_pinned", "sym_size", "sym_numel"}

_active: Simulation | None = None


def _simulation() -> Simulation:
    if _active is None:
        raise RuntimeError("A simulated stream was used outside of racecheck.simulate().")
    return _active


class Stream(Timeline):
    """A stream of the simulated device, with the methods of ``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0, *, name: str = "", **_: Any) -> None:
        super().__init__(name)
        if _active is not None:
            _active.streams.append(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: Event) -> None:
        self.wait(event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _simulation().checker.synchronize(self)

    def query(self) -> bool:
        return _simulation().checker.host.clock.knows(self.clock)


class Event:
    """An event of the simulated device, with the methods of ``torch.cuda.Event``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock = Clock()

    def record(self, stream: Stream | None = None) -> None:
        simulation = _simulation()
        stream = stream or simulation.current
        simulation.checker.issue(stream, "record event")
        self.clock = Clock(stream.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _simulation().current).wait_event(self)

    def synchronize(self) -> None:
        _simulation().checker.host.wait(self.clock)

    def query(self) -> bool:
        return _simulation().checker.host.clock.knows(self.clock)

    def elapsed_time(self, end: Event) -> float:
        return 0.0


class Simulation:
    """What :func:`simulate` yields.

    Attributes:
        checker: has the findings.
        current: the stream to which operations are issued.
        default: the stream that is current at first.
        streams: all that were made.
        operations: all that were issued, in order, each with the clock of its timeline.
    """

    def __init__(self) -> None:
        self.checker = Checker()
        self.default = self.current = Stream(name="default stream")
        self.streams: list[Stream] = [self.default]
        self.operations: list[tuple[Operation, Clock]] = []
        self._groups: dict[str, Stream] = {}
        self._blocks: dict[int, tuple[Block, Any]] = {}
        self._host_memory: set[int] = set()
        self._silent = 0

    @property
    def findings(self) -> list[Finding]:
        return [finding for finding, _ in self.checker.findings.values()]

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        """Issue to ``stream``."""
        previous, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = previous

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Tell the checker nothing of what runs here."""
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1

    def synchronize(self) -> None:
        """The host waits for the device."""
        for stream in self.streams:
            self.checker.synchronize(stream)

    # ---- memory ----------------------------------------------------------------------------------------------------

    def block(self, tensor: torch.Tensor) -> Block:
        """The memory of ``tensor``, from its first use on until nothing refers to it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._blocks:
            block = self.checker.allocate(self.current, storage.nbytes())
            self._blocks[key] = (block, weakref.ref(storage, partial(self._free, key)))
        return self._blocks[key][0]

    def _free(self, key: int, _: Any) -> None:
        block, _ = self._blocks.pop(key)
        self._host_memory.discard(key)
        self.checker.free(block)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """``Tensor.record_stream``."""
        self.block(tensor).recorded.append(stream)

    def to_host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pinned memory of the host: what touches nothing else runs on the host."""
        pinned = tensor.clone()
        self._host_memory.add(pinned.untyped_storage()._cdata)
        self.block(pinned)
        return pinned

    def is_host_memory(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._host_memory

    # ---- operations ------------------------------------------------------------------------------------------------

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """An operator of torch has run; tell the checker what it would do on the device."""
        schema = func._schema
        name = schema.name.split("::")[1]
        reads_back = name in _READS_BACK
        if self._silent or name in _TOUCHES_NOTHING:
            return
        aliases = [value.alias_info for value in schema.returns]
        if any(alias is not None and not alias.is_write for alias in aliases):
            return  # a view
        given = list(zip(schema.arguments, args, strict=False))
        given += [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]
        inputs = [
            (tensor, argument.alias_info is not None and argument.alias_info.is_write)
            for argument, value in given
            for tensor in _tensors(value)
        ]
        new = [] if any(alias is not None for alias in aliases) else list(_tensors(out))
        old = {tensor.untyped_storage()._cdata for tensor, _ in inputs}
        new = [tensor for tensor in new if tensor.untyped_storage()._cdata not in old]
        written = {tensor.untyped_storage()._cdata for tensor, writes in inputs if writes}
        on_host = bool(old) and old <= self._host_memory
        if on_host:
            self._host_memory |= {tensor.untyped_storage()._cdata for tensor in new}
        elif written and written <= self._host_memory:
            # To the host's memory, values of the device come by a copy that the host waits for, unless told not to.
            on_host = name != "copy_"
            reads_back = on_host or not kwargs.get("non_blocking", len(args) > 2 and args[2])
        if name in _ALLOCATES:
            for tensor in new:
                self.block(tensor)
            return
        if reads_back and on_host:
            self.checker.synchronize(self.current)
        timeline = self.checker.host if on_host else self.current
        self._issue(timeline, name, inputs + [(tensor, True) for tensor in new])
        if reads_back:
            self.checker.synchronize(timeline)

    def _issue(self, timeline: Timeline, name: str, touched: Iterable[tuple[torch.Tensor, bool]]) -> Operation:
        operation = self.checker.issue(timeline, name, self.site())
        self.operations.append((operation, Clock(timeline.clock)))
        for tensor, writes in touched:
            if tensor.numel() and not tensor.is_meta:
                size = tensor.element_size()
                start = tensor.storage_offset() * size
                span = 1 + sum((n - 1) * abs(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
                self.checker.access(self.block(tensor), int(start), int(start + span * size), writes, operation)
        return operation

    def collective(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A collective is called."""
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        group: Any = values.get("group") or dist.group.WORLD
        timeline = self._groups.setdefault(group.group_name, Stream(name=f"process group {group.group_name}"))
        if not self._silent:
            self.checker.issue(self.current, f"call {name}")
            timeline.wait(self.current.clock)
            writes, reads = _COLLECTIVES[name]
            touched = [(tensor, False) for key in reads for tensor in _tensors(values[key])]
            touched += [(tensor, True) for key in writes for tensor in _tensors(values[key])]
            for tensor, _ in touched:
                self.block(tensor).recorded.append(timeline)
            self._issue(timeline, name, touched)
        with self.silent():
            work = function(*args, **kwargs)
        if work is None or not values.get("async_op", name in ("isend", "irecv")):
            self.current.wait(timeline.clock)
            return work
        return _Work(work, Clock(timeline.clock))

    def site(self) -> str:
        """The place in the code that is not torch's, nor a layer of communication or tracing."""
        frame: FrameType | None = sys._getframe(1)
        places: list[str] = []
        while frame is not None and len(places) < 2:
            path = frame.f_code.co_filename
            if not any(part in path for part in _LAYERS):
                places.append(f"{path.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}")
            frame = frame.f_back
        return " < ".join(places)


_LAYERS = (
    "/torch/",
    "/zerosync_strategy/racecheck/",
    "/deepspeed/comm/",
    "/deepspeed/utils/nvtx",
    "/core/traffic",
    "contextlib.py",
)


class _Work:
    """What an asynchronous collective returns: ``wait`` orders the current stream, not the host, after it."""

    def __init__(self, work: Any, clock: Clock) -> None:
        self._work = work
        self._clock = clock

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        simulation = _simulation()
        with simulation.silent():  # gloo does some of its work here
            result = self._work.wait(*args, **kwargs)
        simulation.current.wait(self._clock)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Operators(TorchDispatchMode):
    def __init__(self, simulation: Simulation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._simulation = simulation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._simulation.operator(func, args, kwargs or {}, out)
        return out


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


@contextmanager
def simulate() -> Iterator[Simulation]:
    """Check everything that runs here, in this thread. Build the DeepSpeed engine inside as well.

    Yields:
        The simulation. ``simulation.findings`` is empty if all that ran was ordered.
    """
    global _active
    from deepspeed.accelerator import get_accelerator, set_accelerator

    from zerosync_strategy.racecheck.accelerator import SimulatedAccelerator

    if _active is not None:
        raise RuntimeError("racecheck.simulate() is active already.")
    simulation = Simulation()
    stock = get_accelerator()
    functions = {name: getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)}
    get_backend = dist.get_backend
    record_stream = torch.Tensor.record_stream
    _active = simulation
    set_accelerator(SimulatedAccelerator(simulation))
    torch.Tensor.record_stream = lambda tensor, stream: simulation.record_stream(tensor, stream)  # type: ignore
    for name, function in functions.items():
        setattr(dist, name, _counted(simulation, name, function))
    # Code that chooses by the backend takes the device's way.
    dist.get_backend = lambda group=None: dist.Backend("nccl")
    try:
        with AutogradStreams(simulation), _Operators(simulation):
            yield simulation
    finally:
        for name, function in functions.items():
            setattr(dist, name, function)
        dist.get_backend = get_backend
        torch.Tensor.record_stream = record_stream  # type: ignore[method-assign]
        set_accelerator(stock)
        _active = None


def _counted(simulation: Simulation, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: simulation.collective(name, function, args, kwargs)
