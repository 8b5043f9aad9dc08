"""Streams, events and collectives, simulated on CPU: torch computes as always, and the checker is told what would be
asynchronous on a GPU.

The simulation follows the contract of CUDA and NCCL, not the timing of one run:

- An operation is issued to the current stream. A stream runs its operations in order. An operation on host memory alone
  runs on the host.
- Tensors that are made of numbers without ``device=``, or with ``device="cpu"``, are in host memory, as Adam's count of
  its steps. All others are on the device, but for pinned ones.
- A stream or an event is complete (``query()``) only if the host has synchronized with it.
- An operator that reads a value back (``.item()``) makes the host wait for the current stream. So does a blocking copy
  between host and device.
- A collective runs on a stream of its process group, after all earlier operations of the current stream. A synchronous
  collective, or ``wait()`` on its work, makes the current stream wait for it. Until then, and no longer, the backend
  keeps its tensors alive (as NCCL's has since torch 2.8).
- A backward runs each node on the stream of its forward, after the nodes that produce its gradients. It joins the
  streams of the leaves with the caller's stream before its final callbacks.
- The allocator gives freed memory to the next allocation on the same stream, even if other streams still use it.

Memory that was allocated before the simulation is taken as complete, and as the default stream's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.harness.native import COALESCED, Works, all_gather_coalesced
from tests.harness.racecheck.autograd import SimulatedNodes
from tests.harness.racecheck.checker import Clock
from tests.harness.racecheck.device import Device, Stream, running_device

# The functions of torch.distributed that start a collective or a point-to-point operation.
_COLLECTIVES = (
    "all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather", "all_gather_into_tensor",
    "all_gather_single", "all_gather_coalesced", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single",
    "all_to_all_single", "all_to_all", "gather", "scatter", "isend", "irecv", "send", "recv",
)  # fmt: skip


class Simulation(Device):
    """A simulated device under DeepSpeed and torch.distributed. :func:`simulate` yields one.

    Args:
        backend: what ``torch.distributed.get_backend()`` and ``get_backend_config()`` answer during the simulation, for
            code that branches on it; ``None``: the real one.
    """

    def __init__(self, backend: str | None = None) -> None:
        super().__init__()
        self._backend = backend
        self._group_streams: dict[str, Stream] = {}  # by name of the process group
        self._kept: list[torch.Tensor] = []  # by the work of the collective that is being called
        self._active_call: tuple[Stream, str] | None = None  # the outermost collective: its group's stream, its name
        self._group: list[_Work] | None = None  # the works of an open group of collectives

    def _begin(self) -> None:
        from deepspeed.accelerator import get_accelerator, set_accelerator
        from deepspeed.comm import comm

        from tests.harness.racecheck.accelerator import SimulatedAccelerator

        self._undo.append(functools.partial(set_accelerator, get_accelerator()))
        set_accelerator(SimulatedAccelerator(self))
        self.replace(torch.Tensor, "record_stream", lambda tensor, stream: self.record(tensor, stream))
        for name in _COLLECTIVES:
            if hasattr(dist, name):
                wrapped = _simulated(getattr(dist, name))
                for module in (dist, distributed_c10d):  # distributed_c10d compares its functions by identity
                    self.replace(module, name, wrapped)
        for name in ("all_gather_function", "reduce_scatter_function"):  # DeepSpeed's backend keeps references to these
            if (function := getattr(comm.cdb, name, None)) is not None:
                self.replace(comm.cdb, name, _simulated(function))
        for name in COALESCED:
            if hasattr(dist.ProcessGroup, name):
                self.replace(dist.ProcessGroup, name, _simulated(all_gather_coalesced))
        self.replace(dist.ProcessGroup, "_start_coalescing", lambda group, device: self.begin_group())
        self.replace(dist.ProcessGroup, "_end_coalescing", lambda group, device: self.end_group(group))
        if self._backend is not None:
            backend = dist.Backend(self._backend)
            self.replace(dist, "get_backend", lambda group=None: backend)
            self.replace(dist, "get_backend_config", lambda group=None: f"cpu:{backend}")

    def _nodes(self) -> SimulatedNodes:
        return SimulatedNodes(self)

    def launch(self, collective: Callable[[], Any], issue: Callable[..., None], tensors: list[torch.Tensor]) -> Any:
        timeline, *name = self._active_call or (self._group_stream(None),)
        self.checker.issue(self.current, "call")
        timeline.wait(self.current.clock)
        issue(timeline, *name)
        self._kept += tensors
        return collective()

    def _group_stream(self, group: Any) -> Stream:
        found: Any = group or dist.group.WORLD
        name = found.group_name
        if name not in self._group_streams:
            self._group_streams[name] = Stream(name=f"process group {name}")
        return self._group_streams[name]

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call ``function`` of torch.distributed as a collective of the device, and return its work, if any."""
        group = self._group_stream(inspect.signature(function).bind(*args, **kwargs).arguments.get("group"))
        outer, self._active_call = self._active_call, self._active_call or (group, function.__name__)
        kept, self._kept = self._kept, []
        try:
            with self.silent():  # gloo copies in this thread; a device's backend would not
                work = function(*args, **kwargs)
        finally:
            self._active_call = outer
            kept, self._kept = self._kept, kept
        if work is None:
            self.current.wait(group.clock)
            return None
        if not isinstance(work, _Work):
            work = _Work(self, work, Clock(group.clock), kept)
            if self._group is not None:
                work.in_group = True
                self._group.append(work)
        return work

    def begin_group(self) -> None:
        """From here on, collectives are of one group."""
        assert self._group is None
        self._group = []

    def end_group(self, group: Any, work: Any = None) -> Any:
        """Return the work of all since :meth:`begin_group`; ``work``: theirs, where they cannot be waited for alone."""
        assert self._group is not None
        works, self._group = self._group, None
        kept = [tensor for each in works for tensor in each.kept]
        return _Work(self, work or Works([each.inner for each in works]), Clock(self._group_stream(group).clock), kept)


def _simulated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` for the simulation that runs at the time of the call, if one does: DeepSpeed keeps wrappers."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = running_device()
        return device.call(function, args, kwargs) if isinstance(device, Simulation) else function(*args, **kwargs)

    return call


class _Work:
    """The work of an asynchronous collective: ``wait`` makes the current stream wait for it, not the host."""

    def __init__(self, device: Device, work: Any, clock: Clock, kept: list[torch.Tensor]) -> None:
        self._device = device
        self.kept = kept  # alive until wait()
        self.inner = work
        self.in_group = False
        self._clock = clock

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        assert not self.in_group, "the work of a group is waited for, not that of one of its calls"
        with self._device.silent():
            result = self.inner.wait(*args, **kwargs)
        self._device.current.wait(self._clock)
        self.kept.clear()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def simulate(backend: str | None = "nccl") -> AbstractContextManager[Simulation]:
    """Check everything that runs inside, in this thread. Build the DeepSpeed engine inside as well.

    Args:
        backend: as :class:`Simulation` takes it.

    Returns:
        A context of the simulation. ``simulation.findings`` is empty if all accesses were ordered.
    """
    return Simulation(backend).recording()
