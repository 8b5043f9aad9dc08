"""From full local gradients to each rank's partition, every byte once.

Gradients are packed in chunks of a bounded size (R2), laid out by the rank that keeps them, and reduce-scattered into
the partition that DeepSpeed's step consumes; a few chunks travel while the next is packed. Every parameter of the
optimizer takes part in every reduction that is due for it, with zeros where this rank has no gradient: ranks may then
use different parameters (W4 needs no message), and no partition of an earlier window is stepped again.

What is due when is the same on every rank without a message. Parameters are in *buckets* in a fixed order, about that
in which backward completes their gradients. A backward may *stream* some of the buckets: each is sent as soon as its
gradients and the buckets before it are complete, or at the end of the backward. Which buckets those are depends on the
options and the layout alone: none when coalesced without a budget, all without coalescing, with a budget those that do
not fit into it, and in the backward that is known to be the last also those that lie evenly over the ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core import contract
from zerosync_strategy.core.collectives import Pending, reduce_scatter
from zerosync_strategy.core.config import ZeroSyncConfig
from zerosync_strategy.core.ordering import Streams
from zerosync_strategy.core.partition import Partition, Piece, Shipment

CHUNK_BYTES = 4 * 2**20
"""Bytes of one packed chunk, or of one parameter that is larger and streamed."""
IN_FLIGHT = 4
"""Packed chunks at a time. Several small ones keep a link busy while others are packed and added up."""


class Bucket:
    """Parameters of one partition whose gradients are sent together.

    Attributes:
        due: a backward has begun since the bucket was sent last.
        kept: its gradients may stay local until the window closes.
        balanced: no rank is sent much more of it than the others. The last backward streams no other: one link after
            the other would be busy, where at the close all are.
        missing: parameters whose gradient the running backward has not completed.
        produced: by stream, the event after the last of its gradients that was completed there and is not sent (B1).
    """

    def __init__(self, partition: Partition, params: list[Any], kept: bool) -> None:
        self.partition = partition
        self.params = params
        self.kept = kept
        self.due = False
        self.missing: set[Any] = set()
        self.produced: dict[Any, Any] = {}
        self.shipment = partition.shipment_of(params)
        self.balanced = max(self.shipment.widths) * len(self.shipment.widths) <= 1.25 * sum(self.shipment.widths)


class Reducer(ABC):
    """Reduces the local gradients of one DeepSpeed ZeRO optimizer.

    A gradient is local (in full, on its parameter) until it is reduced, then averaged and in this rank's partition.
    Where DeepSpeed accumulates in a wider type than the parameters', so do local gradients, in ``param.grad_accum``.

    Attributes:
        sent_floor: bytes that one rank had to send for what was reduced since :meth:`end_window`.
        peak_bytes: the most local gradients at once since :meth:`end_window`, in bytes.
        norm: the L2 norm of the gradients in the partitions, times DeepSpeed's loss scale, once it has been computed.
    """

    def __init__(self, optimizer: Any, config: ZeroSyncConfig) -> None:
        self.optimizer = optimizer
        self.streams = Streams()
        self._ordered = config.reduction == "ordered"
        self.partitions = self._read_partitions()
        self.params = [param for partition in self.partitions for param in partition.params]
        self._accumulates = optimizer.gradient_accumulation_dtype != optimizer.dtype
        local_dtype = optimizer.gradient_accumulation_dtype if self._accumulates else optimizer.dtype
        self._itemsize = local_dtype.itemsize
        self.buckets = self._make_buckets(config)
        self._bucket_of = {param: bucket for bucket in self.buckets for param in bucket.params}
        self._streaming: deque[Bucket] = deque()
        self._in_flight: deque[tuple[Shipment, torch.Tensor, Pending]] = deque()
        self._abandoned: list[Any] = []  # nobody waits for these, but their memory must outlive them
        self._streamed = False
        self._closed = 0  # windows, and backwards that streamed in this one: the same on every rank (W4)
        self._streaming_backwards = 0
        self._open = False  # the partitions hold gradients of this window, or zeros
        self._local: set[Any] = set()  # parameters with a local gradient, and their bytes
        self._local_bytes = 0
        self.sent_floor = 0
        self.peak_bytes = 0
        self.norm: torch.Tensor | None = None

    # ---- what differs between the stages ---------------------------------------------------------------------------

    @abstractmethod
    def _read_partitions(self) -> list[Partition]: ...

    @abstractmethod
    def _open_partitions(self) -> None:
        """Make this rank's partitions, all zero."""

    @abstractmethod
    def _destinations(self, partition: Partition) -> list[tuple[int, torch.Tensor]]:
        """This rank's partition: flat tensors with the column where each begins, in order."""

    @abstractmethod
    def _hand_over(self) -> None:
        """The step follows: let DeepSpeed find the partitions. Sends nothing."""

    @abstractmethod
    def compute_norm(self) -> torch.Tensor:
        """:attr:`norm`, the same on every rank. A collective call after :meth:`close`."""

    @abstractmethod
    def _discard(self) -> None:
        """Let DeepSpeed forget the partitions of this window."""

    @abstractmethod
    def parameters_floor(self) -> dict[Any, int]:
        """Bytes that one rank must send to give each parameter to all ranks once."""

    # ---- backward --------------------------------------------------------------------------------------------------

    def begin_backward(self, last: bool) -> None:
        """A backward begins; ``last``: it is known to be the last of its window."""
        # DeepSpeed counts one entry for every forward that the backward goes through, and one exit: after a backward
        # through two forwards it would take the next raw backward for one inside another.
        self.optimizer._backward_active_depth = 0
        for bucket in self.buckets:
            bucket.due = True
            bucket.missing = set(bucket.params)
        self._streaming = deque(bucket for bucket in self.buckets if not bucket.kept or (last and bucket.balanced))
        self._streaming_backwards += bool(self._streaming)

    def collect(self, param: Any, gradient: torch.Tensor) -> None:
        """Add ``gradient``, in full, to the local one, as autograd does; its memory stays the caller's."""
        if param.grad is None:
            with contract.stage_3_in_shape(param):
                param.grad = gradient.to(param.dtype, copy=True)
        else:
            param.grad.add_(gradient)

    def gradient_ready(self, param: Any) -> None:
        """Autograd has added to ``param.grad``. In a streaming backward, send what is complete."""
        if self._accumulates and param.grad is not None:
            gradient = param.grad.to(self.optimizer.gradient_accumulation_dtype)
            param.grad_accum = gradient if _accumulated(param) is None else param.grad_accum.add_(gradient)
            param.grad = None
        bucket = self._bucket_of.get(param)
        if bucket is None:
            return
        if param not in self._local:
            self._local.add(param)
            self._local_bytes += self._size(param)
            self.peak_bytes = max(self.peak_bytes, self._local_bytes)
        self.streams.produced(bucket.produced)
        bucket.missing.discard(param)
        bucket.due = True  # also where this backward has sent it already, and comes back to one of its parameters
        while self._streaming and not self._streaming[0].missing:
            self._ship_bucket(self._streaming.popleft())

    @property
    def streaming(self) -> bool:
        """Whether the running backward has gradients to send."""
        return bool(self._streaming)

    def end_backward(self) -> bool:
        """Send the rest of what this backward streams; whether it streamed anything."""
        while self._streaming:
            self._ship_bucket(self._streaming.popleft())
        with self.streams.reducing(()):
            self._finish(0)
        streamed, self._streamed = self._streamed, False
        return streamed

    @property
    def due(self) -> bool:
        """Whether gradients must be reduced before the step; the same on every rank."""
        return any(bucket.due for bucket in self.buckets)

    # ---- reduction -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce(self) -> None:
        """Average what is due over the ranks, into the partitions. A collective call."""
        due = [bucket for bucket in self.buckets if bucket.due]
        with self.streams.reducing():
            for partition in self.partitions:
                params = {param for bucket in due if bucket.partition is partition for param in bucket.params}
                width = max(1, CHUNK_BYTES // (len(partition.pieces) * partition.dtype.itemsize))
                for shipment in partition.shipments_of(params, width):
                    self._ship(shipment)
            self._finish(0)
        for bucket in due:
            self._sent(bucket)

    def close(self) -> None:
        """Everything is in the partitions, and the step follows."""
        self.streams.step_follows()
        self._open_once()
        self._hand_over()
        self.norm = None
        self._open = False  # DeepSpeed's from here on, whether its step succeeds or raises
        self._closed += 1
        self._streaming_backwards = 0

    def end_window(self) -> None:
        """The step has consumed the partitions."""
        self.sent_floor = self.peak_bytes = 0

    @torch.no_grad()
    def _ship_bucket(self, bucket: Bucket) -> None:
        self._streamed = True
        with self.streams.reducing(bucket.produced.values()):
            self._ship(bucket.shipment)
        self._sent(bucket)

    def _ship(self, shipment: Shipment) -> None:
        self._finish(IN_FLIGHT - 1)
        partition = shipment.partition
        packed = self._pack(shipment)
        before, _ = self._scales(partition)
        if before != 1.0:
            packed.mul_(before)
        # What an aborted backward has sent, or a rank that disagrees, is never taken for a part of another reduction.
        tag = self._closed % 2**16 * 2**8 + self._streaming_backwards % 2**8
        pending = reduce_scatter(packed, shipment.widths, partition.process_group, self._ordered, tag)
        self._in_flight.append((shipment, packed, pending))

    def _pack(self, shipment: Shipment) -> torch.Tensor:
        partition = shipment.partition
        packed = torch.empty(sum(shipment.widths), dtype=partition.dtype, device=partition.params[0].device)
        column = 0
        for piece in (piece for row in shipment.rows for piece in row):
            target = packed[column : column + piece.size]
            gradient = self.local(piece.param)
            if gradient is None:
                target.zero_()
            else:
                target.copy_(gradient.reshape(-1)[piece.start : piece.stop])
                self.streams.keep(gradient)
            column += piece.size
        return packed

    def _finish(self, allowed: int) -> None:
        """Wait until at most ``allowed`` chunks are in flight; put the others' averages into the partition."""
        while len(self._in_flight) > allowed:
            shipment, _, pending = self._in_flight.popleft()
            partition = shipment.partition
            average = pending.finish().mul_(self._scales(partition)[1])
            self._open_once()
            _add(average, shipment.rows[dist.get_rank(partition.process_group)], self._destinations(partition))

    def _sent(self, bucket: Bucket) -> None:
        bucket.due = False
        bucket.produced.clear()
        size = sum(bucket.shipment.widths) * bucket.partition.dtype.itemsize
        self.sent_floor += share(size, len(bucket.partition.pieces))
        for param in bucket.params:
            self._drop(param)

    def _scales(self, partition: Partition) -> tuple[float, float]:
        """Factors before and after the sum. In half precision a plain sum over many ranks could overflow."""
        predivide = float(self.optimizer.gradient_predivide_factor)
        if predivide == 1.0 and partition.dtype.itemsize < 4:
            predivide = partition.divisor
        return 1.0 / predivide, predivide / partition.divisor

    def _open_once(self) -> None:
        if not self._open:
            self._open_partitions()
            self._open = True

    # ---- local gradients -------------------------------------------------------------------------------------------

    def local(self, param: Any) -> torch.Tensor | None:
        """The local gradient of ``param``, in full, or ``None``."""
        return _accumulated(param) if self._accumulates else param.grad

    def forget(self) -> None:
        """Forget all gradients of this window, local and reduced; what is in flight is waited for by nobody."""
        self._streaming.clear()
        self._streamed = False
        self._abandoned.extend(self._in_flight)
        self._in_flight.clear()
        for bucket in self.buckets:
            bucket.due = False
            bucket.produced.clear()
        for param in self.params:
            self._drop(param)
        self._open = False
        self._discard()

    def reset(self) -> None:
        """As :meth:`forget`, from whatever point an exception left."""
        self.forget()
        self.optimizer._backward_active_depth = 0
        self.optimizer.clear_backward_seen_flag()

    def _drop(self, param: Any) -> None:
        if param in self._local:
            self._local.remove(param)
            self._local_bytes -= self._size(param)
        param.grad = None
        if self._accumulates:
            param.grad_accum = None

    # ---- buckets ---------------------------------------------------------------------------------------------------

    def _make_buckets(self, config: ZeroSyncConfig) -> list[Bucket]:
        """Backward completes gradients in about the reverse order of the parameters; what it completes last is kept."""
        limit, budget = CHUNK_BYTES, config.unreduced_bytes
        kept = set(self.params) if config.coalesce else set()
        if config.coalesce and budget is not None:
            # What streams fills an eighth of the budget at most before it is sent; the rest may stay. It is one run of
            # parameters: each change between kept and streamed would end a bucket.
            limit = min(CHUNK_BYTES, budget // 8)
            free, kept = budget - limit, set()
            for param in self.params:
                free -= self._size(param)
                if free < 0:
                    break
                kept.add(param)
        buckets: list[Bucket] = []
        for partition in reversed(self.partitions):
            size = 0
            params: list[Any] = []
            for param in reversed(partition.params):
                if params and (size + self._size(param) > limit or (param in kept) != (params[-1] in kept)):
                    buckets.append(Bucket(partition, params, params[-1] in kept))
                    size, params = 0, []
                params.append(param)
                size += self._size(param)
            if params:
                buckets.append(Bucket(partition, params, params[-1] in kept))
        # With several partitions under ZeRO-3, those of the later modules first; else as they are.
        return sorted(buckets, key=lambda bucket: -max(getattr(param, "ds_id", 0) for param in bucket.params))

    def _size(self, param: Any) -> int:
        return param_size(param) * self._itemsize


def param_size(param: Any) -> int:
    """Elements of ``param`` in full, gathered or released."""
    return int(getattr(param, "ds_numel", param.numel()))


def share(size: int, world_size: int) -> int:
    """What one of ``world_size`` ranks sends when ``size`` is reduce-scattered or all-gathered once."""
    return size * (world_size - 1) // world_size


def _accumulated(param: Any) -> torch.Tensor | None:
    return getattr(param, "grad_accum", None)


def _add(source: torch.Tensor, row: list[Piece], destinations: list[tuple[int, torch.Tensor]]) -> None:
    """Add ``source``, the pieces of ``row`` one after the other, to the partition that begins at ``destinations``."""
    begins = [begin for begin, _ in destinations]
    offset = 0
    for piece in row:
        column = piece.column
        while column < piece.column + piece.size:
            begin, tensor = destinations[bisect_right(begins, column) - 1]
            size = min(piece.column + piece.size, begin + tensor.numel()) - column
            target = tensor.narrow(0, column - begin, size)
            target.add_(source[offset : offset + size].to(target.device, target.dtype))
            offset, column = offset + size, column + size
