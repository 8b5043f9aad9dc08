"""The reductions in flight: from a bucket's local gradients to this rank's shard of their average, every byte once.

Gradients are reduce-scattered in chunks of a bounded size, and a few chunks are in flight while the next is prepared
(R2). On several nodes, a chunk may be reduced in two levels (``comm/nodes.py``, R5).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zerosync_strategy.core.comm.collectives import InFlight, Summing
from zerosync_strategy.core.comm.journal import phase
from zerosync_strategy.core.comm.nodes import MessageSizes, Nodes, Sent
from zerosync_strategy.core.failures.agreement import BegunCollectives
from zerosync_strategy.core.gradients.buckets import GradientBucket, Level
from zerosync_strategy.core.gradients.layout import ShardLayout, ShardPart
from zerosync_strategy.core.gradients.shards import GradientShards

_Use = Callable[[torch.Tensor], None]


class _Kept:
    """Gradients of a streaming backward, kept until their ``producers`` may reuse the memory (L1).

    ``event`` follows the reduction's last read of them; ``None``: the reduction has not been waited for yet.
    """

    def __init__(self, memory: list[torch.Tensor], producers: list[torch.Stream]) -> None:
        self.memory, self.producers = memory, producers
        self.nbytes = sum(each.nbytes for each in memory)
        self.event: torch.Event | None = None


@dataclass
class _Flight:
    """A reduction of ``bucket``. ``kept``: the gradients that are read completely once this reduction is done."""

    bucket: GradientBucket
    reduction: InFlight
    kept: _Kept | None = None


class ReductionPipeline:
    """Launches the reductions of one optimizer's buckets, in order, and writes the results into its shards.

    ``ordered``: gradients are summed in the order of the ranks.

    Attributes:
        begun: the collectives begun in this window, for ranks that abort it.
        sent_floor: the minimum that one rank sends for these reductions. :meth:`Reducer.reset_counts` resets it.
        closes: reductions that are launched now also run between nodes.
        passes: begun in this window, for its end too; part of the tag.
        windows_closed: part of the tag of messages, the same on every rank (W4).
        abandoned: reductions of dropped windows. Nothing waits for them, but their memory must outlive them.
    """

    def __init__(self, shards: GradientShards, ordered: bool, sizes: MessageSizes) -> None:
        self._shards, self._ordered, self._sizes = shards, ordered, sizes
        self._local, self._streams = shards.local, shards.streams
        self.begun = BegunCollectives(layout.process_group for layout in shards.layouts)
        self.sent_floor = Sent()
        self.closes = False
        self.passes = 0
        self.windows_closed = 0
        self.abandoned: list[InFlight] = []
        self._in_flight: deque[_Flight] = deque()
        self._kept: deque[_Kept] = deque()
        self._shards_ready = False  # allocated; the parts of reduced buckets hold gradients of this window

    def backward_begins(self) -> None:
        """Prepare for a backward that streams."""
        self.begun.expect()
        self.passes += 1

    def close_begins(self) -> None:
        """Prepare for the reduction of the rest of the window."""
        self.begun.expect()
        self.passes = max(self.passes, 1)  # as on ranks that have begun the same pass in a backward
        self.closes = True

    def closed(self) -> None:
        """End the window. The shards are complete and DeepSpeed's from here on, even if its step raises."""
        self.abandoned = [reduction for reduction in self.abandoned if not reduction.is_over]
        self._shards_ready = False
        self.windows_closed += 1
        self.passes = 0
        self.begun.close()

    def drop(self) -> None:
        """Drop the window, without waiting for reductions in flight."""
        self.begun.close()  # on all ranks alike, or an exception has aborted it (W3)
        self.passes += self.passes > 0  # what was sent meets no later message (W3)
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
        with phase("reduce_scatter", bucket.name):
            self.ready_shards()
            for rows, part in bucket.reduce_scatter_inputs(before):
                self.wait(self._sizes.in_flight - 1)
                if bucket.nodes is None:
                    self._reduce(bucket, rows, part)
                else:
                    self._reduce_within(bucket, bucket.nodes, rows, part)
        if bucket.level is not Level.NODE or self.closes:
            bucket.is_reduced = True
        if bucket.read:
            self._keep(bucket)
        bucket.free_gradients()
        sent = bucket.floor
        if bucket.level is Level.NODE and not self.closes:
            sent = Sent(sent.nbytes - sent.between)
        self.sent_floor = self.sent_floor.plus(sent)

    def launch_between(self, bucket: GradientBucket, nodes: Nodes) -> None:
        """Launch the reduction of the bucket's node shard between nodes."""
        for part in list(bucket.node_shard):
            sums = bucket.take_node_sums(part)
            assert sums is not None
            self.wait(self._sizes.in_flight - 1)
            self._reduce_between(bucket, nodes, part, *self._into_shard(bucket, part), sums)
        bucket.is_reduced = True
        self.sent_floor = self.sent_floor.plus(Sent(bucket.floor.between, bucket.floor.between))

    def wait(self, allowed: int = 0) -> None:
        """Wait until at most ``allowed`` reductions are in flight; write the results of the others into the shards."""
        while len(self._in_flight) > allowed:
            flight = self._in_flight.popleft()
            with phase("wait_reduce_scatter", flight.bucket.name):
                flight.reduction.wait()
            if flight.kept is not None:
                flight.kept.event = self._streams.read_by_reduction()

    def _keep(self, bucket: GradientBucket) -> None:
        """Keep what the reduction of ``bucket`` reads until :meth:`release_memory`, or record it on its stream (L1)."""
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
        """Free kept gradients, except of the last ``allowed`` buckets, once their producers wait for the read (L1)."""
        while len(self._kept) > allowed and (event := self._kept[0].event) is not None:
            kept = self._kept.popleft()
            self._streams.producers_wait(event, kept.producers)
            self._local.count(-kept.nbytes)

    def _begin(self, bucket: GradientBucket) -> Summing:
        """Count a reduction that is sent next, and return how it sums; after an aborted window, compare counts."""
        self.begun.add(bucket.layout.process_group)
        # The tag keeps messages of an aborted backward, or of a rank that disagrees, out of other reductions.
        tag = self.windows_closed % 2**16 * 2**8 + self.passes % 2**8
        return Summing(self._shards.counter, self._ordered, tag, self._local.empty, bucket.label)

    def _reduce(self, bucket: GradientBucket, rows: Any, part: ShardPart) -> None:
        out, use = self._into_shard(bucket, part)
        self._note(bucket, bucket.placement.reduce(rows, self._begin(bucket), out), use)

    def _reduce_within(self, bucket: GradientBucket, nodes: Nodes, rows: Any, part: ShardPart) -> None:
        """Launch the reduction of ``rows`` within the node; its sums are kept, or reduced between nodes next."""
        reduction = bucket.placement.reduce_within(nodes, rows, self._begin(bucket))
        if bucket.level is Level.NODE and not self.closes:
            self._note(bucket, reduction, partial(bucket.keep_node_sums, part))
        else:
            target = self._into_shard(bucket, part)
            self._note(bucket, reduction, partial(self._reduce_between, bucket, nodes, part, *target))

    def _reduce_between(
        self, bucket: GradientBucket, nodes: Nodes, part: ShardPart, out: torch.Tensor | None, use: _Use,
        sums: torch.Tensor,
    ) -> None:  # fmt: skip
        """Launch the reduction between nodes of ``sums`` plus the node shard's sums of this part."""
        if (kept := bucket.take_node_sums(part)) is not None:
            sums = kept.add_(sums)
        reduction = bucket.placement.reduce_between(nodes, part, sums, self._begin(bucket), out)
        self._note(bucket, reduction, use)

    def _note(self, bucket: GradientBucket, reduction: InFlight, use: _Use) -> None:
        reduction.then(use)
        self._in_flight.append(_Flight(bucket, reduction))

    def _into_shard(self, bucket: GradientBucket, part: ShardPart) -> tuple[torch.Tensor | None, _Use]:
        """Return the tensor that the reduction may write ``part`` to directly, if any, and what completes the write."""
        targets = self._shards.parts(bucket.layout, part.offset, part.numel)
        adds = bucket.is_reduced
        out = targets[0] if len(targets) == 1 and not adds and self._shards.on_device else None
        _, after = self._scales(bucket.layout)
        return out, partial(self._add_to_shard, targets, adds, after)

    def _add_to_shard(self, targets: Sequence[torch.Tensor], adds: bool, factor: float, average: torch.Tensor) -> None:
        """Write ``average`` into ``targets``, parts of the shard. ``adds``: add to earlier averages of this window."""
        if factor != 1.0:
            average.mul_(factor)
        done = 0
        for target in targets:
            part = average[done : done + target.numel()]
            done += target.numel()
            if adds and not self._shards.on_device and self._streams.concurrent:
                # Summed on the device: on the host, it would have to wait for each part.
                before = torch.empty(len(target), dtype=target.dtype, device=part.device)
                before.copy_(target, non_blocking=True)
                target.copy_(before.add_(part.to(target.dtype)), non_blocking=True)
            elif adds:
                target.add_(part.to(target.dtype))
            elif part.data_ptr() != target.data_ptr():
                target.copy_(part, non_blocking=True)

    def _scales(self, layout: ShardLayout) -> tuple[float, float]:
        """Return the factors before and after the sum: an unscaled sum in fp16 over many ranks can overflow.

        One after the sum multiplies this rank's shard alone, and rounds once. NCCL's own average would do the same
        without a pass, but rounds its factor to the gradients' dtype (in bf16 on 96 ranks, all averages would be 0.2 %
        too large), and what sums within switches or without copies only sums.
        """
        predivide = float(self._shards.optimizer.gradient_predivide_factor)
        if predivide == 1.0 and layout.dtype is torch.float16:
            predivide = layout.divisor
        return 1.0 / predivide, predivide / layout.divisor
