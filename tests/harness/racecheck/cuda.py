"""Follows the streams and events of CUDA through the hooks of PyTorch's own sanitizer (``torch.cuda._gpu_trace``).

The hooks report that an event is recorded, that a stream waits for an event, and that the host waits for a stream, an
event or the device. They report calls from Python, from autograd's engine and from the process group. Operators are
reported by a dispatch mode, which autograd passes to the threads of a backward.

A collective runs on the stream that waits during its call, which is the process group's. If none waits, it runs on the
current stream. Freed memory may go to the next allocation on the stream of its own allocation: that is the caching
allocator's contract, whatever it does in this run.

Limits:

- Kernels launched outside of torch's operators are invisible: those of ``torch.compile``, and those that a CUDA graph
  replays.
- A wait without an event is invisible. CUDA's legacy default stream waits so for a foreign library's blocking streams.
- Memory that was allocated before the start counts as allocated on the default stream.
- PyTorch's hooks cannot be disabled again. They call into Python for the rest of the process, with no callbacks left.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.cuda import _gpu_trace

from tests.harness.racecheck.autograd import Nodes
from tests.harness.racecheck.checker import Clock, Timeline
from tests.harness.racecheck.recorder import Recorder


class Follower(Recorder):
    """Records the operations of this process on its CUDA device. Start it in the thread that trains."""

    def __init__(self) -> None:
        super().__init__()
        self._timelines: dict[int, Timeline] = {}  # by cudaStream_t
        self._events: dict[int, Clock] = {}  # by cudaEvent_t, as of its last record
        self._launching: Callable[..., None] | None = None  # set during the call of a collective, until it is issued

    def _begin(self) -> None:
        torch.cuda.synchronize()  # earlier operations count as complete
        torch._C._activate_gpu_trace()
        callbacks: list[tuple[Any, Callable[..., None]]] = [
            (_gpu_trace.EventRecordCallbacks, self.event_recorded),
            (_gpu_trace.EventWaitCallbacks, self.event_waited_for),
            (_gpu_trace.EventDeletionCallbacks, self.event_deleted),
            (_gpu_trace.EventSynchronizationCallbacks, self.event_synchronized),
            (_gpu_trace.StreamSynchronizationCallbacks, self.stream_synchronized),
            (_gpu_trace.DeviceSynchronizationCallbacks, self.device_synchronized),
        ]
        for registry, callback in callbacks:
            registry.add_callback(callback)
            self._undo.append(partial(registry.callback_list.remove, callback))
        stock = torch.Tensor.record_stream

        def record_stream(tensor: torch.Tensor, stream: Any) -> None:
            self.record(tensor, self.timeline(stream.cuda_stream))
            stock(tensor, stream)

        self.replace(torch.Tensor, "record_stream", record_stream)
        stock_query = torch.cuda.Event.query

        def query(event: Any) -> bool:
            is_complete: bool = stock_query(event)  # type: ignore[no-untyped-call]
            if is_complete:
                self.event_synchronized(event.cuda_event)
            return is_complete

        self.replace(torch.cuda.Event, "query", query)

    def _nodes(self) -> Nodes:
        return Nodes(self)

    # ---- callbacks of PyTorch ----------------------------------------------------------------------------------------

    def event_recorded(self, event: int, stream: int) -> None:
        with self._lock:
            timeline = self.timeline(stream)
            self.checker.issue(timeline, "record event")
            self._events[event] = Clock(timeline.clock)

    def event_waited_for(self, event: int, stream: int) -> None:
        with self._lock:
            timeline = self.timeline(stream)
            timeline.wait(self._events.get(event, Clock()))
            if self._launching is not None and timeline is not self.current_timeline:
                launching, self._launching = self._launching, None
                launching(timeline)

    def event_deleted(self, event: int) -> None:
        with self._lock:
            self._events.pop(event, None)

    def event_synchronized(self, event: int) -> None:
        with self._lock:
            self.host_waits_for(self._events.get(event, Clock()), "event synchronize")

    def stream_synchronized(self, stream: int) -> None:
        with self._lock:
            self.host_waits_for(self.timeline(stream).clock, "stream synchronize")

    def device_synchronized(self) -> None:
        with self._lock:
            clock = Clock()
            for timeline in self._timelines.values():
                clock.join(timeline.clock)
            self.host_waits_for(clock, "device synchronize")

    # ---- streams and memory ------------------------------------------------------------------------------------------

    def timeline(self, stream: int) -> Timeline:
        """The timeline of a ``cudaStream_t``."""
        if stream not in self._timelines:
            self._timelines[stream] = Timeline(f"stream {stream:#x}" if stream else "default stream")
        return self._timelines[stream]

    @property
    def current_timeline(self) -> Timeline:
        return self.timeline(torch.cuda.current_stream().cuda_stream)

    @property
    def default_timeline(self) -> Timeline:
        return self.timeline(0)

    def is_host_memory(self, tensor: torch.Tensor) -> bool:
        return not tensor.is_cuda

    def runs_on_host(self, inputs: list[torch.Tensor], new: list[torch.Tensor]) -> bool:
        return all(map(self.is_host_memory, [*inputs, *new]))

    def launch(self, collective: Callable[[], Any], issue: Callable[..., None], tensors: list[torch.Tensor]) -> Any:
        self._launching = issue
        try:
            out = collective()
            if self._launching is not None:  # no other stream waited
                issue(self.current_timeline)
            return out
        finally:
            self._launching = None
