"""The streams and events of CUDA, followed through the hooks that PyTorch has for its own sanitizer.

PyTorch says (``torch.cuda._gpu_trace``) when an event is recorded, when a stream waits for one, and when the host waits
for a stream, an event or the device, whether Python asks for it, autograd's engine or the process group. Operators come
through a dispatch mode, which autograd hands on to the threads that run a backward.

A collective runs on the stream that was made to wait when it was called, which is the process group's, or else on the
current one. Memory is freed to the stream that it was allocated on, and may go to the next allocation there: that is
what the caching allocator promises, whatever it does this time.

What it cannot see: kernels launched past torch's operators (``torch.compile``'s own among them, and what a graph
replays), ``query()`` that was answered with yes, streams that wait without an event (CUDA's legacy default stream does
where a foreign library makes blocking streams), and on which stream memory was allocated that is older: it is taken for
the default stream's. PyTorch's hooks, once switched on, call into Python for the rest of the process, there with
nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.cuda import _gpu_trace

from zerosync_strategy.racecheck.autograd import Nodes
from zerosync_strategy.racecheck.clocks import Clock, Timeline
from zerosync_strategy.racecheck.recorder import Recorder


class Follower(Recorder):
    """Follows what this process does on its CUDA device. Start it in the thread that trains."""

    def __init__(self) -> None:
        super().__init__()
        self._timelines: dict[int, Timeline] = {}  # by cudaStream_t
        self._events: dict[int, Clock] = {}  # by cudaEvent_t, as of its last record
        self._launching: Callable[..., None] | None = None  # a collective that is being called

    def _begin(self) -> None:
        torch.cuda.synchronize()  # all that is older is complete
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

        self._replace(torch.Tensor, "record_stream", record_stream)

    def _nodes(self) -> Nodes:
        return Nodes(self)

    # ---- what PyTorch calls ------------------------------------------------------------------------------------------

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
            self.checker.host.wait(self._events.get(event, Clock()))

    def stream_synchronized(self, stream: int) -> None:
        with self._lock:
            self.checker.synchronize(self.timeline(stream))

    def device_synchronized(self) -> None:
        with self._lock:
            for timeline in self._timelines.values():
                self.checker.synchronize(timeline)

    # ---- where things run --------------------------------------------------------------------------------------------

    def timeline(self, stream: int) -> Timeline:
        """That of a ``cudaStream_t``."""
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

    def launch(self, collective: Callable[[], Any], issue: Callable[..., None]) -> Any:
        self._launching = issue
        try:
            out = collective()
            if self._launching is not None:  # no other stream was made to wait
                issue(self.current_timeline)
            return out
        finally:
            self._launching = None
