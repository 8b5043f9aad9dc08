"""The reductions in flight: from a bucket's local gradients to this rank's shard of their average, every byte once.

Gradients are reduce-scattered in chunks of a bounded size, and a few chunks are in flight while the next is prepared
(R2). Of several nodes, a chunk may go in two levels (``comm/nodes.py``, R5).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zerosync_strategy.core.comm.collectives import InFlight, Summing, phase
from zerosync_strategy.core.comm.messages import Messages
from zerosync_strategy.core.comm.nodes import Nodes, Sent
from zerosync_strategy.core.failures.aborted import BegunCollectives
from zerosync_strategy.core.gradients.buckets import GradientBucket, Level
from zerosync_strategy.core.gradients.placement import Part, ShardLayout
from zerosync_strategy.core.gradients.shards import GradientShards

_Use = Callable[[torch.Tensor], None]


class _Kept:
    """The memory of gradients of a backward that reduces as it goes, until their ``producers`` may have it again (L1).

    ``event``: after the reduction has read it; ``None``: nobody has waited for that yet.
    """

    def __init__(self, memory: list[torch.Tensor], producers: list[Any]) -> None:
        self.memory, self.producers = memory, producers
        self.nbytes = sum(each.nbytes for each in memory)
        self.event: Any = None


@dataclass
class _InFlight:
    """A reduction of ``bucket``; ``kept``: with it, all is read of that."""

    bucket: GradientBucket
    reduction: InFlight
    kept: _Kept | None = None


class ReductionPipeline:
    """Launches the reductions of one optimizer's buckets, in order, and puts what arrives into its shards.

    ``ordered``: ranks' gradients are summed in the order of the ranks.

    Attributes:
        begun: what was sent in this window, for ranks that abort it.
        sent_floor: what one rank had to send for what was reduced. :meth:`Reducer.reset_counts` sets it to zero.
        closes: what is launched is reduced between nodes, too.
        windows_closed: with the next, a tag that is the same on every rank (W4).
        abandoned: reductions of dropped windows. Nobody waits for them, but their memory must outlive them.
    """

    def __init__(self, shards: GradientShards, ordered: bool, messages: Messages) -> None:
        self._shards, self._ordered, self._messages = shards, ordered, messages
        self._local, self._streams = shards.local, shards.streams
        self.begun = BegunCollectives(layout.process_group for layout in shards.layouts)
        self.sent_floor = Sent()
        self.closes = False
        self.windows_closed = 0
        self.abandoned: list[InFlight] = []
        self._in_flight: deque[_InFlight] = deque()
        self._kept: deque[_Kept] = deque()
        self._streaming_backwards = 0
        self._shards_ready = False  # they exist, and those of reduced buckets hold gradients of this window

    def backward_begins(self) -> None:
        """A backward begins that reduces gradients as it goes."""
        self.begun.expect()
        self._streaming_backwards += 1

    def close_begins(self) -> None:
        """What is left of the window is about to be reduced."""
        self.begun.expect()
        self.closes = True

    def closed(self) -> None:
        """Everything is in the shards, which are DeepSpeed's from here on, whether its step succeeds or raises."""
        self.abandoned = [reduction for reduction in self.abandoned if not reduction.is_over]
        self._shards_ready = False
        self.windows_closed += 1
        self._streaming_backwards = 0
        self.begun.close()

    def drop(self) -> None:
        """The window is dropped: nobody waits for what is in flight."""
        self.abandoned.extend(each.reduction for each in self._in_flight)
        self._in_flight.clear()
        while self._kept:
            kept = self._kept.popleft()
            self._local.count(-kept.nbytes)
            self._record(kept.memory)
        self._shards_ready = False

    def ready_shards(self) -> None:
        if not self._shards_ready:
            self._shards.allocate()
            self._shards_ready = True

    def launch(self, bucket: GradientBucket) -> None:
        """Launch the reductions of one bucket, and free its local gradients."""
        layout = bucket.layout
        before, _ = self._scales(layout)
        self.begun.compare_aborted()
        with phase("reduce_scatter", bucket.name):
            self.ready_shards()
            for rows, part in bucket.reduce_scatter_inputs(before):
                self.wait(self._messages.in_flight - 1)
                if bucket.nodes is None:
                    self._reduce(bucket, rows, part)
                else:
                    self._reduce_within(bucket, bucket.nodes, rows, part)
        if bucket.level is not Level.NODE or self.closes:
            bucket.is_reduced = True
        self._keep(bucket)
        bucket.free_gradients()
        sent = self._shards.sent(bucket)
        if bucket.level is Level.NODE and not self.closes:
            sent = Sent(sent.nbytes - sent.between)
        self.sent_floor = self.sent_floor.plus(sent)

    def launch_between(self, bucket: GradientBucket, nodes: Nodes) -> None:
        """Launch the reduction between nodes of what the bucket's node shard has."""
        for part in list(bucket.node_shard):
            sums = bucket.take_node_sums(part)
            assert sums is not None
            self.wait(self._messages.in_flight - 1)
            self._reduce_between(bucket, nodes, part, *self._into_shard(bucket, part), sums)
        bucket.is_reduced = True
        sent = self._shards.sent(bucket)
        self.sent_floor = self.sent_floor.plus(Sent(sent.between, sent.between))

    def wait(self, allowed: int = 0) -> None:
        """Wait until at most ``allowed`` reductions are in flight; put the others' averages into the shards."""
        while len(self._in_flight) > allowed:
            flight = self._in_flight.popleft()
            with phase("wait_reduce_scatter", flight.bucket.name):
                flight.reduction.wait()
            if flight.kept is not None:
                flight.kept.event = self._streams.read_by_reduction()

    def _keep(self, bucket: GradientBucket) -> None:
        """Keep what the reduction of ``bucket`` reads until :meth:`release_memory`, or let the allocator wait."""
        memory, bucket.read = bucket.read, []
        if not bucket.is_fresh or not bucket.grad_ready:
            self._record(memory)
            return
        kept = _Kept(memory, list(bucket.grad_ready))
        self._local.count(kept.nbytes)
        self._kept.append(kept)
        if self._in_flight and self._in_flight[-1].bucket is bucket:
            self._in_flight[-1].kept = kept
        else:
            kept.event = self._streams.read_by_reduction()

    def _record(self, memory: list[torch.Tensor]) -> None:
        for each in memory:
            self._streams.record_stream_for_reduction(each)

    def release_memory(self, allowed: int = 0) -> None:
        """Let producers have the memory of all buckets but so many: they wait for what has read it."""
        while len(self._kept) > allowed and (event := self._kept[0].event) is not None:
            kept = self._kept.popleft()
            self._streams.producers_wait(event, kept.producers)
            self._local.count(-kept.nbytes)

    def _how(self, bucket: GradientBucket) -> Summing:
        # By the tag, an aborted backward's messages, or those of a rank that disagrees, never join another reduction.
        tag = self.windows_closed % 2**16 * 2**8 + self._streaming_backwards % 2**8
        return Summing(self._ordered, tag, self._local.empty, bucket.label)

    def _reduce(self, bucket: GradientBucket, rows: Any, part: Part) -> None:
        """Launch the reduction of ``rows`` over all ranks."""
        out, use = self._into_shard(bucket, part)
        self._note(bucket, bucket.placement.reduce(rows, self._how(bucket), out), use)

    def _reduce_within(self, bucket: GradientBucket, nodes: Nodes, rows: Any, part: Part) -> None:
        """Launch the reduction of ``rows`` within the node; then its sums stay, or go on between nodes."""
        reduction = bucket.placement.reduce_within(nodes, rows, self._how(bucket))
        if bucket.level is Level.NODE and not self.closes:
            self._note(bucket, reduction, partial(bucket.keep_node_sums, part))
        else:
            target = self._into_shard(bucket, part)
            self._note(bucket, reduction, partial(self._reduce_between, bucket, nodes, part, *target))

    def _reduce_between(
        self, bucket: GradientBucket, nodes: Nodes, part: Part, out: torch.Tensor | None, use: _Use, sums: torch.Tensor
    ) -> None:
        """Launch the reduction between nodes of ``sums``, and of what the node shard has."""
        if (kept := bucket.take_node_sums(part)) is not None:
            sums = kept.add_(sums)
        reduction = bucket.placement.reduce_between(nodes, part, sums, self._how(bucket), out)
        self._note(bucket, reduction, use)

    def _note(self, bucket: GradientBucket, reduction: InFlight, use: _Use) -> None:
        self.begun.add(bucket.layout.process_group)
        reduction.then(use)
        self._in_flight.append(_InFlight(bucket, reduction))

    def _into_shard(self, bucket: GradientBucket, part: Part) -> tuple[torch.Tensor | None, _Use]:
        """Return where averages for ``part`` may go at once, and what puts them there in any case."""
        targets = self._shards.parts(bucket.layout, part.offset, part.numel)
        adds = bucket.is_reduced
        out = targets[0] if len(targets) == 1 and not adds and self._shards.on_device else None
        _, after = self._scales(bucket.layout)
        return out, partial(self._add_to_shard, targets, adds, after)

    def _add_to_shard(self, targets: Sequence[torch.Tensor], adds: bool, factor: float, average: torch.Tensor) -> None:
        """Put what was reduced into ``targets``, parts of the shard; ``adds``: to what this window has put there."""
        if factor != 1.0:
            average.mul_(factor)
        done = 0
        for target in targets:
            part = average[done : done + target.numel()]
            done += target.numel()
            if adds and not self._shards.on_device and self._streams.concurrent:
                # Summed on the device: the host would have to wait for each part.
                before = torch.empty(len(target), dtype=target.dtype, device=part.device)
                before.copy_(target, non_blocking=True)
                target.copy_(before.add_(part.to(target.dtype)), non_blocking=True)
            elif adds:
                target.add_(part.to(target.dtype))
            elif part.data_ptr() != target.data_ptr():
                target.copy_(part, non_blocking=True)

    def _scales(self, layout: ShardLayout) -> tuple[float, float]:
        """Factors before and after the sum. In half precision a plain sum over many ranks could overflow.

        NCCL's own average would save that pass, but rounds the factor to the gradients' dtype: of 96 ranks in bf16, all
        averages would be 0.2 % too large.
        """
        predivide = float(self._shards.optimizer.gradient_predivide_factor)
        if predivide == 1.0 and layout.dtype.itemsize < 4:
            predivide = layout.divisor
        return 1.0 / predivide, predivide / layout.divisor
