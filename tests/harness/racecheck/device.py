"""The simulated device: its streams, its events, and the host's pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.harness.racecheck.checker import Clock, Timeline
from tests.harness.racecheck.recorder import Recorder, running


def running_device() -> Device | None:
    """The simulated device of the running recorder, if it has one."""
    recorder = running()
    return recorder if isinstance(recorder, Device) else None


class _Awaited:
    """What the host can wait for, with ``clock``. It may outlive the simulation; all recorded work is complete then."""

    clock: Clock

    def synchronize(self) -> None:
        if device := running_device():
            device.host_waits_for(self.clock, f"{type(self).__name__}.synchronize")

    def query(self) -> bool:
        device = running_device()
        return device is None or device.checker.host.clock.knows(self.clock)


class Stream(Timeline, _Awaited):
    """A stream of the simulated device, with the methods of ``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0, *, name: str = "", **_: Any) -> None:
        super().__init__(name)
        if simulated := running_device():
            simulated.streams.append(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: Event) -> None:
        self.wait(event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event(_Awaited):
    """An event of the simulated device, with the methods of ``torch.cuda.Event``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock = Clock()

    def record(self, stream: Stream | None = None) -> None:
        if device := running_device():
            stream = stream or device.current
            device.checker.issue(stream, "record event")
            self.clock = Clock(stream.clock)

    def wait(self, stream: Stream | None = None) -> None:
        if device := running_device():
            (stream or device.current).wait_event(self)

    def elapsed_time(self, end: Event) -> float:
        return 0.0


class Device(Recorder):
    """A recorder with simulated streams and simulated pinned memory. A subclass simulates autograd and collectives.

    Attributes:
        current: the stream to which operations are issued.
        default: the stream that is current at the start.
        streams: all streams of the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.default = self.current = Stream(name="default stream")
        self.streams: list[Stream] = [self.default]
        self._host_memory: set[int] = set()  # by storage

    @property
    def current_timeline(self) -> Timeline:
        return self.current

    @property
    def default_timeline(self) -> Timeline:
        return self.default

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        """Issue operations to ``stream``; with ``None``, to the current stream."""
        previous, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = previous

    def synchronize(self) -> None:
        """The host waits for all streams."""
        clock = Clock()
        for stream in self.streams:
            clock.join(stream.clock)
        self.host_waits_for(clock, "synchronize")

    # ---- memory of the host ------------------------------------------------------------------------------------------

    def to_host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of ``tensor`` in pinned memory. An operator that touches only such memory runs on the host."""
        return self.in_host_memory(tensor.clone)

    def in_host_memory(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the tensor that ``make`` makes, in host memory."""
        with self.silent():
            made = make()
        self._host_memory.add(made.untyped_storage()._cdata)
        self.block(made)
        return made

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
