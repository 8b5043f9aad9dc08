"""Collectives of many ranks on one GPU: delays in proportion to their bytes, on a stream for each process group.

The process group is torch's fake one, whose collectives do nothing. A delay keeps its stream busy, as NCCL's would, and
fills its output from this rank's input alone. It takes no kernel's place on the GPU: what NCCL's kernels take from
those of the model is not in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_single",
    "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all_single", "isend", "irecv",
)  # fmt: skip
METHODS = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")  # of process groups: torch 2.13's, older
CYCLES = 20_000_000  # of a calibration


@contextmanager
def collectives(instead: Callable[..., Any]) -> Iterator[None]:
    """Call ``instead(function, args, kwargs)`` for every collective, nested ones once."""
    nested = False
    places = [(module, name) for module in (dist, dist.distributed_c10d) for name in COLLECTIVES]
    places += [(deepspeed.comm.comm.cdb, name) for name in ("all_gather_function", "reduce_scatter_function")]
    stock = [(owner, name, getattr(owner, name)) for owner, name in places if hasattr(owner, name)]

    def replacement(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal nested
            if nested:
                return function(*args, **kwargs)
            nested = True
            try:
                return instead(function, args, kwargs)
            finally:
                nested = False

        call.__wrapped__ = function  # type: ignore[attr-defined]
        return call

    for owner, name, function in stock:
        setattr(owner, name, replacement(function))
    for name in METHODS:
        if (method := getattr(dist.ProcessGroup, name, None)) is not None:
            stock.append((dist.ProcessGroup, name, method))
            setattr(dist.ProcessGroup, name, replacement(_of_group(method)))
    try:
        yield
    finally:
        for owner, name, function in stock:
            setattr(owner, name, function)


def _of_group(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of process groups, which is built in, with names for what it is given."""

    def all_gather_coalesced(group: Any, outputs: Any, inputs: Any, async_op: bool = True) -> Any:
        return method(group, outputs, inputs)

    return all_gather_coalesced


class Delay:
    """A collective's work, with a future as DDP wants it. ``stream``: runs it; ``None``: it was left out."""

    def __init__(self, outputs: Sequence[torch.Tensor], alive: Any, stream: Any = None) -> None:
        self._outputs, self._alive, self._stream = list(outputs), alive, stream
        self._event = None if stream is None else stream.record_event()

    def wait(self, *_: Any) -> bool:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        self._alive = None
        return True

    def is_completed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        if self._stream is None:
            future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            future.set_result(self._outputs)
            return future
        future = torch.futures.Future(devices=[self._outputs[0].device])
        with torch.cuda.stream(self._stream):
            future.set_result(self._outputs)
        return future


class Links:
    """What collectives are replaced by: for ``collectives()``.

    Args:
        rate: bytes per second that each rank sends and receives at once; ``None`` leaves collectives out.
        latency: seconds that each takes besides.

    Attributes:
        seconds: of all delays; whoever counts them sets it to zero.
    """

    def __init__(self, rate: float | None, latency: float = 0.0) -> None:
        self._rate, self._latency = rate, latency
        self._streams: dict[Any, Any] = {}
        self._hertz = 0.0
        self.seconds = 0.0

    def set_rate(self, rate: float) -> None:
        self._rate = rate

    def calibrate(self) -> None:
        """Find out how fast the GPU counts. It counts slower while it has just been idle."""
        for _ in range(3):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            torch.cuda._sleep(CYCLES)
            ended.record()
            ended.synchronize()
        self._hertz = CYCLES / (began.elapsed_time(ended) / 1000)

    def __call__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        tensors = [given[name] for name in ("output_tensor", "output", "tensor") if name in given][:1]
        tensors += [given[name] for name in ("input_tensor", "input") if name in given]
        outputs, sources = given.get("outputs", tensors[:1]), given.get("inputs", tensors[-1:])
        if not outputs or not all(tensor.is_cuda for tensor in (*outputs, *sources)):
            return function(*args, **kwargs)
        if self._rate is None:
            work = Delay(outputs, None)
            return work if given.get("async_op") else None
        group, name = given.get("group"), inspect.unwrap(function).__name__
        world = dist.get_world_size(group)
        nbytes = sum(max(output.nbytes, source.nbytes) for output, source in zip(outputs, sources, strict=True))
        seconds = int(nbytes * (2 if name == "all_reduce" else 1) * (world - 1) / world) / self._rate + self._latency
        self.seconds += seconds
        stream = self._streams.get(group)
        if stream is None:
            stream = self._streams[group] = torch.cuda.Stream(priority=-1)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            torch.cuda._sleep(int(seconds * self._hertz))
            for output, source in zip(outputs, sources, strict=True):
                if output.numel() == world * source.numel() and world > 1:  # gathered: each rank has sent the same
                    output.view(world, -1).copy_(source.reshape(1, -1).clone().expand(world, -1))
                elif source.numel() == world * output.numel() and world > 1:
                    output.view(-1).copy_(source.view(world, -1)[0])
        work = Delay(outputs, (outputs, sources), stream)
        if given.get("async_op"):
            return work
        work.wait()
        return None


def replay(calls: list[tuple[Callable[..., Any], Any, Any]]) -> None:
    """Issue ``calls`` again, one after the other, and wait for them."""
    works = [function(*args, **kwargs) for function, args, kwargs in calls]
    for work in works:
        if work is not None:
            work.wait()
