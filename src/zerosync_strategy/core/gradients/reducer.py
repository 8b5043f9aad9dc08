"""The reduction: from full local gradients to this rank's shard of their average, every byte once.

Gradients are packed in chunks of a bounded size (R2), by the rank that keeps them, and reduce-scattered into the shard
that DeepSpeed's step uses; a few chunks are in flight while the next is packed. Every parameter of the optimizer takes
part in every reduction that includes its bucket, with zeros where this rank has no gradient. So ranks may use different
parameters (W4 needs no message), and no shard of an earlier window is stepped again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import Pending, reduce_scatter
from zerosync_strategy.core.comm.profile import phase
from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.config import ZeroSyncConfig
from zerosync_strategy.core.engine import zero
from zerosync_strategy.core.gradients.buckets import Bucket, make_buckets
from zerosync_strategy.core.gradients.layout import ReduceScatterInput, ShardLayout, ShardSlice
from zerosync_strategy.core.gradients.local import LocalGradients

CHUNK_BYTES = 4 * 2**20
"""Bytes of one packed chunk, or of one parameter that is larger and streamed."""
IN_FLIGHT = 4
"""Packed chunks at a time. Several small ones keep a link busy while others are packed and added up."""


@dataclass(frozen=True)
class _InFlight:
    """A reduce-scatter in flight. ``packed`` stays alive until it is complete."""

    packing: ReduceScatterInput
    packed: torch.Tensor
    pending: Pending


class Reducer(ABC):
    """Reduces the local gradients of one DeepSpeed ZeRO optimizer.

    A gradient is local (in full, on its parameter) until it is reduced, then averaged and in this rank's shard.

    Args:
        optimizer: the ZeRO optimizer.
        config: the options.
        names: of the parameters, for profiles.

    Attributes:
        sent_floor: bytes that one rank had to send for what was reduced since :meth:`end_window`.
        norm: the L2 norm of the gradients in the shards, times DeepSpeed's loss scale, once it has been computed.
    """

    def __init__(self, optimizer: Any, config: ZeroSyncConfig, names: Mapping[Any, str]) -> None:
        self.optimizer = optimizer
        self.streams = Streams()
        self.layouts = self._read_layouts()
        self.params = [param for layout in self.layouts for param in layout.params]
        self.local = LocalGradients(optimizer)
        self.buckets = make_buckets(self.layouts, self.local, config, CHUNK_BYTES, names)
        self.sent_floor = 0
        self.norm: torch.Tensor | None = None
        self._ordered = config.reduction == "ordered"
        self._bucket_of = {param: bucket for bucket in self.buckets for param in bucket.params}
        self._to_stream: deque[Bucket] = deque()  # in the running backward
        self._has_streamed = False
        self._in_flight: deque[_InFlight] = deque()
        self._abandoned: list[_InFlight] = []  # nobody waits for these, but their memory must outlive them
        self._windows_closed = 0  # with the next, a tag that is the same on every rank (W4)
        self._streaming_backwards = 0
        self._shards_ready = False  # they hold gradients of this window, or zeros

    # ---- what differs between the stages ---------------------------------------------------------------------------

    @abstractmethod
    def _read_layouts(self) -> list[ShardLayout]: ...

    @abstractmethod
    def _zero_shards(self) -> None:
        """Make this rank's gradient shards, all zero."""

    @abstractmethod
    def shard_tensors(self, layout: ShardLayout) -> list[tuple[int, torch.Tensor]]:
        """Return the flat tensors of this rank's shard with the offset where each begins, in order."""

    @abstractmethod
    def hand_over(self) -> None:
        """Let DeepSpeed's step find the shards. Sends nothing."""

    @abstractmethod
    def compute_norm(self) -> torch.Tensor:
        """Return :attr:`norm`, the same on every rank. A collective call after :meth:`close`."""

    @abstractmethod
    def combine_norms(self, stock: Any) -> torch.Tensor:
        """Return the norm of all gradients from what DeepSpeed computes as such. A collective call."""

    @abstractmethod
    def _discard_shards(self) -> None:
        """Let DeepSpeed forget the shards of this window."""

    @abstractmethod
    def parameters_floor(self) -> dict[Any, int]:
        """Return, by parameter, the bytes that one rank must send to give it to all ranks once."""

    # ---- backward --------------------------------------------------------------------------------------------------

    def begin_backward(self, last: bool) -> None:
        """A backward begins; ``last``: it is known to be the last of its window."""
        zero.expect_backward(self.optimizer)
        for bucket in self.buckets:
            bucket.begin_backward()
        self._to_stream = deque(
            bucket for bucket in self.buckets if not bucket.deferred or (last and bucket.evenly_sharded)
        )
        self._streaming_backwards += bool(self._to_stream)

    def gradient_ready(self, param: Any) -> None:
        """Autograd has added to ``param.grad``. In a backward that streams, reduce the buckets that are complete."""
        self.local.convert(param)
        bucket = self._bucket_of.get(param)
        if bucket is None:
            return
        self.local.count(param)
        self.streams.record_grad_ready(bucket.grad_ready)
        bucket.pending_params.discard(param)
        bucket.needs_reduce = True  # also where this backward has reduced it already, and adds to it once more
        while self._to_stream and not self._to_stream[0].pending_params:
            self._reduce_bucket(self._to_stream.popleft())

    @property
    def is_streaming(self) -> bool:
        """Whether the running backward has buckets to reduce."""
        return bool(self._to_stream)

    def end_backward(self) -> bool:
        """Reduce the rest of what this backward streams; return whether it streamed anything."""
        while self._to_stream:
            self._reduce_bucket(self._to_stream.popleft())
        with self.streams.on_reduction_stream(()):
            self._wait_reduce_scatter(0)
        streamed, self._has_streamed = self._has_streamed, False
        return streamed

    @property
    def keeps_gradients(self) -> bool:
        """Whether a backward leaves every gradient on its parameter, unless it is promised to be the last."""
        return self.local.on_parameters and all(bucket.deferred for bucket in self.buckets)

    @property
    def needs_reduce(self) -> bool:
        """Whether gradients must be reduced before the step; the same on every rank."""
        return any(bucket.needs_reduce for bucket in self.buckets)

    # ---- reduction -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce(self) -> None:
        """Average over the ranks what is not reduced yet, into the shards. A collective call."""
        buckets = [bucket for bucket in self.buckets if bucket.needs_reduce]
        with self.streams.on_reduction_stream():
            for layout in self.layouts:
                params = {param for bucket in buckets if bucket.layout is layout for param in bucket.params}
                width = max(1, CHUNK_BYTES // (layout.world_size * layout.dtype.itemsize))
                for packing in layout.inputs_by_offset(params, width):
                    self._launch_reduce_scatter(packing)
            self._wait_reduce_scatter(0)
        for bucket in buckets:
            self._mark_reduced(bucket)

    def close(self) -> None:
        """Everything is in the shards, and the step follows."""
        self.streams.wait_for_reductions()
        self._ready_shards()
        self.hand_over()
        self.norm = None
        self._abandoned = [flight for flight in self._abandoned if not flight.pending.is_complete]
        self._shards_ready = False  # DeepSpeed's from here on, whether its step succeeds or raises
        self._windows_closed += 1
        self._streaming_backwards = 0

    def end_window(self) -> None:
        """The step has used the shards."""
        self.streams.reductions_wait_for_step()
        self.sent_floor = 0
        self.local.reset_peak()

    @torch.no_grad()
    def _reduce_bucket(self, bucket: Bucket) -> None:
        self._has_streamed = True
        with self.streams.on_reduction_stream(bucket.grad_ready.values()):
            self._launch_reduce_scatter(bucket.input)
        self._mark_reduced(bucket)

    def _launch_reduce_scatter(self, packing: ReduceScatterInput) -> None:
        self._wait_reduce_scatter(IN_FLIGHT - 1)
        layout = packing.layout
        with phase("reduce_scatter", packing.name):
            packed = self._pack(packing)
            before, _ = self._scales(layout)
            if before != 1.0:
                packed.mul_(before)
            # An aborted backward's messages, or those of a rank that disagrees, never join another reduction.
            tag = self._windows_closed % 2**16 * 2**8 + self._streaming_backwards % 2**8
            pending = reduce_scatter(packed, packing.widths, layout.process_group, self._ordered, tag)
        self._in_flight.append(_InFlight(packing, packed, pending))

    def _pack(self, packing: ReduceScatterInput) -> torch.Tensor:
        layout = packing.layout
        packed = torch.empty(sum(packing.widths), dtype=layout.dtype, device=layout.params[0].device)
        offset = 0
        for piece in (piece for row in packing.rows for piece in row):
            target = packed[offset : offset + piece.size]
            gradient = self.local.get(piece.param)
            if gradient is None:
                target.zero_()
            else:
                target.copy_(gradient.reshape(-1)[piece.start : piece.stop])
                self.streams.record_stream_for_reduction(gradient)
            offset += piece.size
        return packed

    def _wait_reduce_scatter(self, allowed: int) -> None:
        """Wait until at most ``allowed`` chunks are in flight; add the others' averages to the shards."""
        while len(self._in_flight) > allowed:
            flight = self._in_flight.popleft()
            layout = flight.packing.layout
            with phase("wait_reduce_scatter", flight.packing.name):
                average = flight.pending.finish().mul_(self._scales(layout)[1])
                self._ready_shards()
                row = flight.packing.rows[dist.get_rank(layout.process_group)]
                _add(average, row, self.shard_tensors(layout))

    def _mark_reduced(self, bucket: Bucket) -> None:
        bucket.mark_reduced()
        nbytes = sum(bucket.input.widths) * bucket.layout.dtype.itemsize
        self.sent_floor += sent_by_one_rank(nbytes, bucket.layout.world_size)
        for param in bucket.params:
            self.local.discard(param)

    def _scales(self, layout: ShardLayout) -> tuple[float, float]:
        """Factors before and after the sum. In half precision a plain sum over many ranks could overflow."""
        predivide = float(self.optimizer.gradient_predivide_factor)
        if predivide == 1.0 and layout.dtype.itemsize < 4:
            predivide = layout.divisor
        return 1.0 / predivide, predivide / layout.divisor

    def _ready_shards(self) -> None:
        if not self._shards_ready:
            self._zero_shards()
            self._shards_ready = True

    # ---- dropping --------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Drop all gradients of this window, local and reduced; nobody waits for what is in flight."""
        self._to_stream.clear()
        self._has_streamed = False
        self._abandoned.extend(self._in_flight)
        self._in_flight.clear()
        for bucket in self.buckets:
            bucket.mark_reduced()
        for param in self.params:
            self.local.discard(param)
        self._shards_ready = False
        self._discard_shards()
        self.streams.reductions_wait_for_step()

    def reset(self) -> None:
        """As :meth:`drop`, from whatever point an exception left."""
        self.drop()
        zero.forget_backward(self.optimizer)


def sent_by_one_rank(nbytes: int, world_size: int) -> int:
    """Return what one of ``world_size`` ranks sends when ``nbytes`` are reduce-scattered or all-gathered once."""
    return nbytes * (world_size - 1) // world_size


def _add(source: torch.Tensor, row: list[ShardSlice], shard: list[tuple[int, torch.Tensor]]) -> None:
    """Add ``source``, the slices of ``row`` one after the other, to the tensors of ``shard`` by their offsets."""
    begins = [begin for begin, _ in shard]
    done = 0
    for piece in row:
        offset = piece.offset
        while offset < piece.offset + piece.size:
            begin, tensor = shard[bisect_right(begins, offset) - 1]
            size = min(piece.offset + piece.size, begin + tensor.numel()) - offset
            target = tensor.narrow(0, offset - begin, size)
            target.add_(source[done : done + size].to(target.device, target.dtype))
            done, offset = done + size, offset + size
