"""Streams, events and collectives on CPU, simulated: torch computes as always, and the checker is told what would be
asynchronous on a GPU.

What is simulated is CUDA's and NCCL's contract, not one run of it:

- an operation is issued to the current stream, and runs there in order; one on host memory alone runs on the host;
- a stream or an event is complete (``query()``) only if the host knows it, whatever a device would have done by now;
- an operator that reads a value back (``.item()``), and a copy between host and device that is not told otherwise,
  make the host wait for the current stream;
- a collective runs on a stream of its process group, after what the current stream had when it was called; a
  synchronous one, or ``wait()`` on its work, makes the current stream wait for it. The backend keeps its tensors alive;
- backward runs each node on the stream of its forward, waits for the nodes that feed it, and joins the streams of the
  leaves with the caller's before its final callbacks;
- the allocator gives freed memory to the next allocation on the same stream, whatever other streams still do with it.

Memory that is older than the simulation is taken as it is: complete, and the default stream's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from zerosync_strategy.racecheck.autograd import SimulatedNodes
from zerosync_strategy.racecheck.clocks import Clock, Timeline
from zerosync_strategy.racecheck.recorder import Recorder, running

# What torch.distributed has of calls that return a work, or wait for it.
_CALLS = (
    "all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather", "all_gather_into_tensor",
    "all_gather_single", "all_gather_coalesced", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single",
    "all_to_all_single", "all_to_all", "gather", "scatter", "isend", "irecv", "send", "recv",
)  # fmt: skip


def _simulation() -> Simulation | None:
    found = running()
    return found if isinstance(found, Simulation) else None


class Stream(Timeline):
    """A stream of the simulated device, with the methods of ``torch.cuda.Stream``.

    Streams and events may outlive the simulation, in an engine's queues for one. All that they were told is complete
    then.
    """

    def __init__(self, device: Any = None, priority: int = 0, *, name: str = "", **_: Any) -> None:
        super().__init__(name)
        if simulation := _simulation():
            simulation.streams.append(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: Event) -> None:
        self.wait(event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        if simulation := _simulation():
            simulation.checker.synchronize(self)

    def query(self) -> bool:
        simulation = _simulation()
        return simulation is None or simulation.checker.host.clock.knows(self.clock)


class Event:
    """An event of the simulated device, with the methods of ``torch.cuda.Event``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock = Clock()

    def record(self, stream: Stream | None = None) -> None:
        if simulation := _simulation():
            stream = stream or simulation.current
            simulation.checker.issue(stream, "record event")
            self.clock = Clock(stream.clock)

    def wait(self, stream: Stream | None = None) -> None:
        if simulation := _simulation():
            (stream or simulation.current).wait_event(self)

    def synchronize(self) -> None:
        if simulation := _simulation():
            simulation.checker.host.wait(self.clock)

    def query(self) -> bool:
        simulation = _simulation()
        return simulation is None or simulation.checker.host.clock.knows(self.clock)

    def elapsed_time(self, end: Event) -> float:
        return 0.0


class Simulation(Recorder):
    """A device that is not there. :func:`simulate` yields one.

    Args:
        backend: what ``torch.distributed.get_backend()`` says meanwhile, for code that chooses by it; ``None``: what
            there is.

    Attributes:
        current: the stream to which operations are issued.
        default: the stream that is current at first.
        streams: all that were made.
    """

    def __init__(self, backend: str | None = None) -> None:
        super().__init__()
        self.default = self.current = Stream(name="default stream")
        self.streams: list[Stream] = [self.default]
        self._backend = backend
        self._groups: dict[str, Stream] = {}
        self._called: tuple[Stream, str] | None = (
            None  # the collective that is being called: its group's stream, its name
        )
        self._host_memory: set[int] = set()

    def _begin(self) -> None:
        from deepspeed.accelerator import get_accelerator, set_accelerator
        from deepspeed.comm import comm

        from zerosync_strategy.racecheck.accelerator import SimulatedAccelerator

        self._undo.append(functools.partial(set_accelerator, get_accelerator()))
        set_accelerator(SimulatedAccelerator(self))
        self._replace(torch.Tensor, "record_stream", lambda tensor, stream: self.record(tensor, stream))
        for name in _CALLS:
            if hasattr(dist, name):
                call = _followed(getattr(dist, name))
                for module in (dist, distributed_c10d):  # which knows its functions by identity
                    self._replace(module, name, call)
        for name in ("all_gather_function", "reduce_scatter_function"):  # which DeepSpeed's backend keeps
            if (kept := getattr(comm.cdb, name, None)) is not None:
                self._replace(comm.cdb, name, _followed(kept))
        if self._backend is not None:
            backend = dist.Backend(self._backend)
            self._replace(dist, "get_backend", lambda group=None: backend)

    def _nodes(self) -> SimulatedNodes:
        return SimulatedNodes(self)

    # ---- streams -----------------------------------------------------------------------------------------------------

    @property
    def stream_in_use(self) -> Timeline:
        return self.current

    @property
    def owner_of_the_unknown(self) -> Timeline:
        return self.default

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        """Issue to ``stream``."""
        previous, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = previous

    def synchronize(self) -> None:
        """The host waits for the device."""
        for stream in self.streams:
            self.checker.synchronize(stream)

    # ---- memory of the host ------------------------------------------------------------------------------------------

    def to_host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pinned memory of the host: what touches nothing else runs on the host."""
        with self.silent():
            pinned = tensor.clone()
        self._host_memory.add(pinned.untyped_storage()._cdata)
        self.block(pinned)
        return pinned

    def is_host_memory(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._host_memory

    def runs_on_host(self, inputs: list[torch.Tensor], new: list[torch.Tensor]) -> bool:
        on_host = bool(inputs) and all(map(self.is_host_memory, inputs))
        if on_host:
            self._host_memory |= {tensor.untyped_storage()._cdata for tensor in new}
        return on_host

    def _free(self, key: int, reference: Any) -> None:
        self._host_memory.discard(key)
        super()._free(key, reference)

    # ---- collectives -------------------------------------------------------------------------------------------------

    def launch(self, collective: Callable[[], Any], issue: Callable[..., None]) -> Any:
        timeline, *name = self._called or (self._group_stream(None),)
        self.checker.issue(self.current, "call")
        timeline.wait(self.current.clock)
        issue(timeline, *name)
        return collective()

    def _group_stream(self, group: Any) -> Stream:
        found: Any = group or dist.group.WORLD
        name = found.group_name
        if name not in self._groups:
            self._groups[name] = Stream(name=f"process group {name}")
        return self._groups[name]

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One of torch.distributed's functions is called; what it gives back in its place."""
        group = self._group_stream(inspect.signature(function).bind(*args, **kwargs).arguments.get("group"))
        outer, self._called = self._called, self._called or (group, function.__name__)
        try:
            with self.silent():  # gloo copies in this thread what a device's backend would not
                work = function(*args, **kwargs)
        finally:
            self._called = outer
        if work is None:
            self.current.wait(group.clock)
            return None
        return work if isinstance(work, _Work) else _Work(self, work, Clock(group.clock))


def _followed(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, told to the simulation that runs when it is called: DeepSpeed keeps some for longer."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        simulation = _simulation()
        return function(*args, **kwargs) if simulation is None else simulation.call(function, args, kwargs)

    return call


class _Work:
    """What an asynchronous collective returns: ``wait`` orders the current stream, not the host, after it."""

    def __init__(self, simulation: Simulation, work: Any, clock: Clock) -> None:
        self._simulation = simulation
        self._work = work
        self._clock = clock

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with self._simulation.silent():
            result = self._work.wait(*args, **kwargs)
        self._simulation.current.wait(self._clock)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def simulate(backend: str | None = "nccl") -> Iterator[Simulation]:
    """Check everything that runs here, in this thread. Build the DeepSpeed engine inside as well.

    Args:
        backend: what ``torch.distributed.get_backend()`` says meanwhile, so that code that chooses by it takes the
            device's way; ``None``: what there is.

    Yields:
        The simulation. ``simulation.findings`` is empty if all that ran was ordered.
    """
    simulation = Simulation(backend)
    simulation.start()
    try:
        yield simulation
    finally:
        simulation.stop()
