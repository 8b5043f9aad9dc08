"""All waits between streams, and all memory that is kept for a stream that did not allocate it.

Reductions run on their own stream, concurrently with the backward: they pack local gradients, wait for the collective
and add the result to the gradient shards. Each rule (``docs/streams.md``) is a method, except B2: once a bucket is
sent, autograd accumulates in new memory, so it overwrites nothing that a reduction reads.

On a device without streams, such as the CPU, none of the methods waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

_Allocated = Iterable[tuple[torch.Tensor, torch.Stream | None]]  # each with the stream that has allocated it


class Streams:
    """The streams of one engine, made on the engine's device.

    Attributes:
        concurrent: the device runs asynchronously to the host.
        has_graphs: the device may capture work into CUDA graphs.
    """

    def __init__(self) -> None:
        from deepspeed.accelerator import get_accelerator

        self._accelerator: Any = get_accelerator()
        self._writers: set[torch.Stream] = set()  # streams that wrote shards since gathers last waited for them
        self._written: torch.Event | None = None  # event of a gather stream after it waited for earlier writers
        self._reduction: Any = None if self._accelerator.is_synchronized_device() else self._make_stream()
        self.concurrent = self._reduction is not None
        on_cuda = self.concurrent and self._accelerator.device_name() == "cuda"
        self._device = self._accelerator.current_device() if on_cuda else None
        self._by_handle: dict[int, torch.Stream] = {}
        self.has_graphs = on_cuda

    def _make_stream(self) -> torch.Stream:
        # High priority, because its kernels are short, and a collective of all ranks waits for them.
        if self._accelerator.device_name() == "cuda":
            return self._accelerator.Stream(priority=-1)
        return self._accelerator.Stream()

    def _current(self) -> torch.Stream:
        """Return the current stream.

        Called for every gradient. ``torch.cuda.current_stream()`` first checks for a device and makes a new object, in
        a dozen Python calls.
        """
        if self._device is None:
            return self._accelerator.current_stream()
        handle = torch._C._cuda_getCurrentRawStream(self._device)
        return self._by_handle.get(handle) or self._by_handle.setdefault(handle, self._accelerator.current_stream())

    def run_on(self, device: torch.device) -> bool:
        """Return whether operators on tensors of ``device`` run on streams."""
        return self.concurrent and device.type == self._accelerator.device_name()

    @property
    def caller(self) -> torch.Stream | None:
        """The current stream; ``None`` on a device without streams."""
        return None if self._reduction is None else self._current()

    def caller_waits_for(self, streams: Iterable[torch.Stream | None]) -> None:
        """Make the caller's stream wait for the work issued so far to ``streams``, of callers or gathers (S3, U2)."""
        caller: Any = self.caller
        for stream in streams:
            if stream is not None and stream != caller:
                caller.wait_stream(stream)

    def refuse_capture(self, what: str) -> None:
        """Raise ``RuntimeError`` if ``what``, about to begin, would be captured into a CUDA graph.

        The graph would replay neither events nor later work, and read parameters of ZeRO-3 at old addresses.
        """
        if self.has_graphs and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{what} under ZeroSync was captured into a CUDA graph. ZeRO's reductions are not part of a graph, and"
                " parameters of ZeRO-3 have other memory in each step. On stages 1 and 2, capture the forward alone; on"
                " stage 3, train without CUDA graphs."
            )

    # ---- gradients -----------------------------------------------------------------------------------------------

    def record_grad_ready(self, ready: dict[torch.Stream, torch.Event], spare: dict[torch.Stream, torch.Event]) -> None:
        """Record in ``ready``, by stream, with a ``spare`` event, that the current stream has completed a gradient."""
        if self._reduction is None:
            return
        stream = self._current()
        event = spare.get(stream)
        if event is None:
            event = spare[stream] = self._accelerator.Event()
        event.record(stream)
        ready[stream] = event

    def reductions_wait_for_caller(self) -> None:
        """Before a backward that reduces, make reductions wait for the backwards and the step before it (S2)."""
        if self._reduction is not None:
            self._reduction.wait_stream(self._current())

    @contextmanager
    def on_reduction_stream(self, events: Iterable[torch.Event] | None = None) -> Iterator[None]:
        """While active, issue to the reduction stream after ``events``, by default the caller's work so far (B1)."""
        if self._reduction is None:
            yield
            return
        if events is None:
            self._reduction.wait_stream(self._current())
        else:
            for event in events:
                self._reduction.wait_event(event)
        with self._accelerator.stream(self._reduction):
            yield

    def record_stream_for_reduction(self, gradient: torch.Tensor) -> None:
        """Keep the memory of a gradient until the reduction stream has read it (L1)."""
        if self._reduction is not None:
            gradient.record_stream(self._reduction)

    def read_by_reduction(self) -> torch.Event:
        """Return an event after what the reduction stream, the current one, has read so far (L1)."""
        return self._reduction.record_event()

    def producers_wait(self, event: torch.Event, producers: Iterable[torch.Stream]) -> None:
        """Make the ``producers`` of gradients wait for ``event``, after the reads, before they reuse memory (L1)."""
        for stream in producers:
            stream.wait_event(event)

    def wait_for_reductions(self) -> None:
        """Make the caller's stream wait for all reductions (B3)."""
        if self._reduction is not None:
            self._current().wait_stream(self._reduction)

    def host_waits_for_reductions(self) -> None:
        """Make the host wait for all reductions, if their results are in host memory (B3)."""
        if self._reduction is not None:
            self._host_waits_for(self._reduction)

    def host_waits_for_caller(self) -> None:
        """Make the host wait for the caller's stream, for a copy to host memory or the end of our work."""
        if self._reduction is not None:
            self._host_waits_for(self._current())

    def _host_waits_for(self, stream: torch.Stream) -> None:
        stream.record_event().synchronize()

    # ---- gathers -------------------------------------------------------------------------------------------------

    def make_gather_streams(self, count: int, overlaps: bool) -> Sequence[torch.Stream | None]:
        """Return ``count`` streams for gathers; without ``overlaps``, the one that computes; ``None``: no streams."""
        if self._reduction is None:
            return [None]
        if not overlaps:
            return [self._accelerator.default_stream()]
        return [self._make_stream() for _ in range(count)]

    def on_gather_stream(self, gather_stream: torch.Stream) -> AbstractContextManager[None]:
        """Issue to a gather stream, which allocates and frees the memory of its gathers."""
        context: AbstractContextManager[None] = self._accelerator.stream(gather_stream)
        return context

    def record_unshard(self, gather_stream: torch.Stream) -> torch.Event:
        """Return an event after the work of ``gather_stream`` so far, such as a copy of gathered values to the host."""
        return gather_stream.record_event()

    def record_arrival(self) -> torch.Event:
        """Return an event after the current stream has waited for a gather into the memory of parameters."""
        return self._current().record_event()

    def record_landing(self, gather_stream: torch.Stream) -> torch.Event:
        """Return an event after the current stream has copied a gather's values out of the memory of ``gather_stream``.

        ``gather_stream`` reuses that memory after the event (L2).
        """
        event = self._current().record_event()
        gather_stream.wait_event(event)
        return event

    def wait_for_unshard(self, event: torch.Event) -> None:
        """Make the caller's stream wait for one gather (U2)."""
        self._current().wait_event(event)

    def share_unshard(
        self, event: torch.Event, users: list[torch.Stream | None], memory: Callable[[], _Allocated]
    ) -> None:
        """Make the caller's stream wait for one gather, unless it is among the ``users`` that have waited (U2)."""
        current = self._current()
        if current in users:
            return
        self.wait_for_unshard(event)
        users.append(current)
        self.keep_for_caller(memory())

    def keep_for_caller(self, memory: _Allocated) -> None:
        """Keep memory that another stream has allocated until the caller's stream has used it (L2)."""
        current = self._current()
        for tensor, owner in memory:
            if owner != current:
                tensor.record_stream(current)

    def record_stream_for_gathers(self, memory: torch.Tensor, gather_stream: torch.Stream) -> None:
        """Keep the memory of a parameter, perhaps the program's own, until a gather stream has read it (L2)."""
        if self._reduction is not None:
            memory.record_stream(gather_stream)

    def record_write(self) -> None:
        """Record that the current stream writes shards of parameters, or is about to."""
        if self._reduction is not None:
            self._writers.add(self._current())

    def gathers_wait_for_writes(self, gather_streams: Sequence[torch.Stream]) -> None:
        """Before a gather, make all gather streams wait for the work of the writing streams so far (S1)."""
        if not self._writers:
            return
        while self._writers:
            writer = self._writers.pop()
            for stream in gather_streams:
                stream.wait_stream(writer)
        self._written = gather_streams[0].record_event()

    def gathers_wait_for_caller(self, gather_stream: torch.Stream) -> None:
        """Before a gather stream fills memory of the caller's stream, wait for what has used that memory (L2)."""
        gather_stream.wait_stream(self._current())

    def caller_waits_for_writes(self, gather_streams: Sequence[torch.Stream]) -> None:
        """Before the caller's stream reads shards itself, make it wait for their writes, not for gathers (S1)."""
        self.gathers_wait_for_writes(gather_streams)
        if self._written is not None:
            self._current().wait_event(self._written)

    # ---- memory of the host --------------------------------------------------------------------------------------

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is in host memory while the device has its own."""
        is_pinned: bool = self.concurrent and (
            tensor.device.type != self._accelerator.device_name() or self._accelerator.is_pinned(tensor)
        )
        return is_pinned

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised flat tensor on the host, pinned on a device with streams.

        torch rounds the bytes of pinned memory up to a power of two.
        """
        if not self.concurrent or self._accelerator.device_name() == "cuda":
            return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self.concurrent)
        pinned: torch.Tensor = self._accelerator.pin_memory(torch.empty(numel, dtype=dtype, device="cpu"))
        return pinned

    def give_host_memory_back(self) -> None:
        """Return the unused pinned memory that torch caches to the system."""
        if self.concurrent and self._accelerator.device_name() == "cuda":
            torch._C._host_emptyCache()


class HostCopy:
    """A copy of a small tensor on the host, in pinned memory that is reused.

    It has at most ``numel`` elements. Reading it waits for nothing but the copy (W4).
    """

    def __init__(self, streams: Streams, numel: int, dtype: torch.dtype = torch.int64) -> None:
        self._streams = streams
        self._copy = torch.empty(numel, dtype=dtype)
        self._filled = self._copy
        self._event: torch.Event | None = None
        if streams.concurrent:
            accelerator = streams._accelerator
            self._copy, self._event = accelerator.pin_memory(self._copy), accelerator.Event()

    def begin(self, tensor: torch.Tensor) -> None:
        """Copy ``tensor``, flat. On a device with streams, the host does not wait."""
        self._filled = self._copy[: len(tensor)].copy_(tensor, non_blocking=True)
        if self._event is not None:
            self._event.record(self._streams.caller)

    def arrived(self) -> torch.Tensor:
        """Return the elements copied last, in memory that the next copy overwrites. The host waits for the copy."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return self._filled
