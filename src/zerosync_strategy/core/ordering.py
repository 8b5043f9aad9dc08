"""The one place where a stream waits for another, or memory is kept for a stream that did not allocate it.

Reductions run on a stream of their own: they pack local gradients, wait for the collective and add up partitions there,
beside the backward that goes on. The rules, each with its method:

- **B1** :meth:`Streams.reducing`: a reduction starts after every producer of the gradients that it packs. A gradient's
  producer is the stream on which autograd completed it, which its event says.
- **B2** has no method: producers overwrite nothing that a reduction uses. A gradient is packed into memory that the
  reduction stream allocates, and what autograd accumulates next is a new gradient.
- **B3** :meth:`Streams.step_follows`: before the optimizer step, and only there, the caller's stream waits for the
  reductions.
- **L1** :meth:`Streams.keep`: a gradient, which belongs to its producer's stream, is recorded on the reduction stream
  that reads it, so that the allocator gives its memory to nobody before. What the reduction stream allocates, it frees:
  packed chunks after the collective, which the backend keeps alive, and partitions after the step, which comes before
  all that the reduction stream is told next.
- **S1** :meth:`Streams.gathers_follow`: ZeRO-3's gathers start after the step that wrote the partitions they read.
- **U2** :meth:`Streams.uses`: what uses a gathered parameter starts after its gather, and waits for no other.
- **W4** :meth:`Streams.to_host`: the host reads an answer after its copy, and waits for nothing else.

On a device without streams, such as the CPU, none of them waits for anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Streams:
    """The streams of one engine. Made on the device that the engine runs on."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Make the streams anew: the device has gained some, or lost them. No reduction may be in progress."""
        from deepspeed.accelerator import get_accelerator

        self._accelerator: Any = get_accelerator()
        self._reduction: Any = None if self._accelerator.is_synchronized_device() else self._accelerator.Stream()

    def produced(self, events: dict[Any, Any]) -> None:
        """The current stream has completed a gradient: let ``events``, the last one by stream, say so.

        Raises:
            RuntimeError: it is being captured into a CUDA graph, which would replay neither the event nor what follows.
        """
        if self._reduction is None:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "A backward under ZeroSync was captured into a CUDA graph. ZeRO's reductions are not part of a graph;"
                " capture the forward alone, or train without CUDA graphs."
            )
        stream, event = self._accelerator.current_stream(), self._accelerator.Event()
        event.record(stream)
        events[stream] = event

    @contextmanager
    def reducing(self, events: Iterable[Any] | None = None) -> Iterator[None]:
        """Issue to the reduction stream, after ``events``, or without them after all the caller's stream has (B1)."""
        if self._reduction is None:
            yield
            return
        if events is None:
            self._reduction.wait_stream(self._accelerator.current_stream())
        else:
            for event in events:
                self._reduction.wait_event(event)
        with self._accelerator.stream(self._reduction):
            yield

    @property
    def concurrent(self) -> bool:
        """Whether the device runs beside the host."""
        return self._reduction is not None

    def to_host(self, tensor: torch.Tensor) -> Callable[[], list[Any]]:
        """Copy a small tensor to the host without waiting; calling the result waits for the copy alone (W4)."""
        if self._reduction is None:
            return tensor.tolist
        copy, event = self._accelerator.pin_memory(torch.empty_like(tensor, device="cpu")), self._accelerator.Event()
        copy.copy_(tensor, non_blocking=True)
        event.record(self._accelerator.current_stream())

        def read() -> list[Any]:
            event.synchronize()
            return copy.tolist()

        return read

    def keep(self, tensor: torch.Tensor) -> None:
        """A gradient is read on the reduction stream, and freed by its producers' side (L1)."""
        if self._reduction is not None:
            tensor.record_stream(self._reduction)

    def step_follows(self) -> None:
        """The caller's stream waits for all reductions (B3)."""
        if self._reduction is not None:
            self._accelerator.current_stream().wait_stream(self._reduction)

    def for_gathers(self, count: int, stock: Any) -> list[Any]:
        """So many streams for gathers. DeepSpeed's own, ``stock``, if that is the one that computes."""
        if self._reduction is None:
            return []
        if stock == self._accelerator.default_stream():  # overlap_comm is off
            return [stock]
        return [self._accelerator.Stream() for _ in range(count)]

    @contextmanager
    def unsharding(self, gather_stream: Any) -> Iterator[None]:
        """Wait for a gather, and unpack it, where it was issued: its memory comes from there and returns there."""
        with self._accelerator.stream(gather_stream):
            yield

    def unsharded(self, gather_stream: Any) -> Any:
        """The event of a gather that was unpacked just now."""
        event = self._accelerator.Event()
        event.record(gather_stream)
        return event

    def uses(self, unsharded: Any) -> None:
        """The caller's stream waits for one gather (U2)."""
        self._accelerator.current_stream().wait_event(unsharded)

    def gathers_follow(self, gather_stream: Any) -> None:
        """Gathers on this stream start after what the caller's stream has (S1)."""
        gather_stream.wait_stream(self._accelerator.current_stream())
