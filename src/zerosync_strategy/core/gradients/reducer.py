"""The reduction: from full local gradients to this rank's shard of their average, every byte once.

Gradients are reduce-scattered bucket by bucket into the shard that DeepSpeed's step uses (``pipeline.py``). Every
parameter of the optimizer takes part in every reduction that includes its bucket, with zeros where this rank has no
gradient. So ranks may use different parameters (W4 needs no message), and no shard of an earlier window is stepped
again. What a reduction costs the host is in proportion to the number of parameters, whatever the number of ranks (H1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zerosync_strategy.core.comm.collectives import phase
from zerosync_strategy.core.comm.messages import Messages
from zerosync_strategy.core.comm.nodes import Sent
from zerosync_strategy.core.comm.streams import HostCopy
from zerosync_strategy.core.engine import zero
from zerosync_strategy.core.engine.gradient_hooks import GradientHooks
from zerosync_strategy.core.gradients.buckets import GradientBucket, Level, LocalGradient
from zerosync_strategy.core.gradients.items import ItemCount
from zerosync_strategy.core.gradients.pipeline import ReductionPipeline
from zerosync_strategy.core.gradients.shards import GradientShards
from zerosync_strategy.core.options.config import ZeroSyncConfig

SMALL_BYTES = 4 * 2**20
"""Bytes of gradients that may be one bucket. More are four at least: the last backward can reduce some, and where a
bucket is packed, a quarter of the gradients is there twice. DeepSpeed's bucket size bounds buckets too, but a parameter
that is larger goes in messages of as many bytes as this at least."""
KEPT_BUCKETS = 1
"""Buckets of a backward that are reduced, and whose memory its producers need not wait for yet (L1)."""


class Reducer:
    """Reduces the local gradients of one DeepSpeed ZeRO optimizer, into its ``shards``.

    A gradient is local (in full, on its parameter) until it is reduced, then averaged and in this rank's shard.

    Attributes:
        first_uses: returns, by ``id``, when the forward has used each parameter first (``params/unit_order.py``), if
            the backward gathers parameters between its gradients; ``None``: it does not.
        items: that the coming gradients are the mean over.
        bucket_bytes: of a bucket, and of a part of a larger parameter, at most.
        only_adds: the running backward reduces nothing, so that who has its ``place`` has nothing to do.
    """

    def __init__(
        self, shards: GradientShards, config: ZeroSyncConfig, names: Mapping[Any, str], messages: Messages,
        first_uses: Callable[[], Mapping[int, int] | None],
    ) -> None:  # fmt: skip
        self.shards, self.optimizer, self.layouts = shards, shards.optimizer, shards.layouts
        self.params, self.streams, self.local = shards.params, shards.streams, shards.local
        self.is_native = bool(self.layouts) and all(layout.is_native for layout in self.layouts if layout.params)
        nbytes = sum(map(self.local.nbytes, self.params))
        largest = min(max(nbytes // 4, SMALL_BYTES), shards.most_bytes(config, messages))
        limit = min(max(int(self.optimizer.reduce_bucket_size) * shards.dtype.itemsize, messages.least), largest)
        self.bucket_bytes = chunk_bytes = min(largest, max(limit, SMALL_BYTES))
        common = {"chunk_bytes": chunk_bytes, "local": self.local, "streams": self.streams, "names": names}
        self.buckets = shards.make_buckets(config, limit, common)
        for layout in self.layouts:
            if layout.params and layout.nodes is not None and config.gradients.device is not None:
                layout.nodes.connect(layout.params[0].device)
        self.items = ItemCount(config.loss_reduction)
        self._norm: torch.Tensor | None = None  # once it has been computed
        self._host_norm = HostCopy(self.streams, 1, torch.float32)
        self._may_stream = config.gradients.automatic  # sooner or later
        self.gradients = [gradient for bucket in self.buckets for gradient in bucket.gradients]
        self._to_stream: deque[GradientBucket] = deque()  # in the running backward
        self._has_streamed = False
        self.only_adds = False
        self._hooks: GradientHooks | None = None  # while it is attached
        self._late: LocalGradient | None = None  # whose hooks may still run when the backward begins by it
        self.first_uses = first_uses
        self._reduces_by_module = False  # the running backward, and not by gradient
        self.pipeline = ReductionPipeline(shards, config.reduction == "ordered", messages)

    def gradients_floor(self) -> Sent:
        """Return what one rank must send to reduce all gradients once."""
        floor = Sent()
        for bucket in self.buckets:
            floor = floor.plus(self.shards.sent(bucket))
        return floor

    # ---- backward --------------------------------------------------------------------------------------------------

    def attach(self, hook_of: Callable[[LocalGradient], Callable[[Any], None]]) -> None:
        """From here on, autograd calls the hook of each gradient that it has added to."""
        self._hooks = GradientHooks(self.optimizer, [(each.param, hook_of(each)) for each in self.gradients])

    def detach(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()

    def begin_backward(self, last: bool, ready: LocalGradient | None = None) -> None:
        """A backward begins; ``last``: it is known to be the last of its window; ``ready``: by this gradient.

        A ``RuntimeError``: it is being captured into a CUDA graph.
        """
        self.streams.refuse_capture()
        zero.expect_backward(self.optimizer)
        if self._hooks is not None and self._hooks.run_last():
            self._late = ready
        for bucket in self.buckets:
            bucket.needs_reduce = True
        self._to_stream = deque(bucket for bucket in self.buckets if last or bucket.level is not Level.WHOLE)
        self.pipeline.closes = last
        if self._to_stream:
            for bucket in self._to_stream if self.streams.concurrent else ():
                bucket.is_fresh = all(gradient.place is None for gradient in bucket.gradients)
            self._choose_when_to_reduce(midway=ready is not None)
            self.pipeline.backward_begins()
            self.streams.reductions_wait_for_caller()
        self.only_adds = not self._to_stream and self._late is None

    def _choose_when_to_reduce(self, midway: bool) -> None:
        """Let the running backward reduce a bucket when it is complete, or when the modules that use it are behind.

        Off ZeRO-3, and where all parameters are held, nothing else of this process group is sent meanwhile, so that the
        order of the buckets is order enough. Else gathers come in between, in the order of the modules, and gradients
        do not come alike on all ranks: one may not use what another does (W4).
        """
        first_uses = self.first_uses()
        self._reduces_by_module = first_uses is not None
        if first_uses is None:
            for bucket in self._to_stream:
                bucket.pending = set(bucket.gradients)
            return
        for bucket in self._to_stream:
            # What no module has used, or is asked for too late, is reduced at the end.
            bucket.first_use = 0 if midway else min(first_uses.get(id(param), 0) for param in bucket.params)
        self._to_stream = deque(sorted(self._to_stream, key=lambda bucket: -bucket.first_use))

    def gradient_ready(self, gradient: LocalGradient) -> bool:
        """Autograd has added to it. Return whether :meth:`reduce_complete` has something to do."""
        gradient.came = True
        if gradient is self._late:
            return False
        bucket = gradient.bucket
        bucket.collect(gradient)
        bucket.needs_reduce = True  # also where this backward has reduced it already, and adds to it once more
        if not self._to_stream:
            return False
        self.streams.record_grad_ready(bucket.grad_ready, bucket.spare_events)
        if self._reduces_by_module:
            return False
        bucket.pending.discard(gradient)
        return not self._to_stream[0].pending

    def reduce_complete(self) -> None:
        """In a backward that streams, reduce the buckets that are complete, in their order."""
        self._stream(lambda bucket: not bucket.pending)

    def needs_reduce_behind(self, behind: int) -> bool:
        """Return whether :meth:`reduce_behind` has something to do."""
        return bool(self._to_stream) and self._reduces_by_module and self._to_stream[0].first_use > behind

    def reduce_behind(self, behind: int) -> None:
        """In a backward that streams, reduce the buckets first used after ``behind``, the same on every rank."""
        self._stream(lambda bucket: bucket.first_use > behind)

    @torch.no_grad()
    def _stream(self, may_reduce: Callable[[GradientBucket], bool]) -> None:
        while self._to_stream and may_reduce(self._to_stream[0]):
            bucket = self._to_stream.popleft()
            self._has_streamed = True
            with self.streams.on_reduction_stream(bucket.grad_ready.values()):
                self.pipeline.launch(bucket)
            self.pipeline.release_memory(KEPT_BUCKETS)

    def end_backward(self) -> bool:
        """Reduce the rest of what this backward streams; return whether it streamed anything."""
        if (late := self._late) is not None:
            self._late = None
            self.gradient_ready(late)
        self.only_adds = False
        self._stream(lambda bucket: True)
        with self.streams.on_reduction_stream(()):
            self.pipeline.wait()
        streamed, self._has_streamed = self._has_streamed, False
        return streamed

    def defer(self, budget: int) -> int:
        """Let gradients within ``budget`` bytes stay unreduced until the window closes; return how many bytes that is.

        Called between two windows. It chooses the first parameters, whose gradients a backward completes last. Of
        several nodes, all are kept in node shards first, if these fit.
        """
        nbytes = {bucket: sum(map(self.local.nbytes, bucket.params)) for bucket in self.buckets}
        in_shards = {
            bucket: bucket.layout.in_node_shard(size) for bucket, size in nbytes.items() if bucket.layout.nodes
        }
        left = budget - sum(in_shards.values())
        if left < 0:
            in_shards, left = {}, budget
        for bucket in reversed(self.buckets):
            more = nbytes[bucket] - in_shards.get(bucket, 0)
            if more <= left:
                bucket.level = Level.WHOLE
                left -= more
            else:
                bucket.level = Level.NODE if bucket in in_shards else Level.SHARD
                left = -1  # and no other of the later ones
        self.local.free_blocks()
        kept = {Level.WHOLE: nbytes, Level.NODE: in_shards}
        return sum(kept[bucket.level][bucket] for bucket in self.buckets if bucket.level in kept)

    @property
    def keeps_gradients(self) -> bool:
        """Whether a backward leaves every gradient on its parameter, unless it is promised to be the last."""
        return (
            not self.local.converts
            and not self._may_stream
            and all(bucket.level is Level.WHOLE for bucket in self.buckets)
        )

    @property
    def needs_reduce(self) -> bool:
        """Whether gradients must be reduced before the step; the same on every rank."""
        return any(bucket.needs_reduce or bucket.node_shard for bucket in self.buckets)

    # ---- reduction -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce(self) -> None:
        """Average over the ranks what is not reduced yet, into the shards. A collective call."""
        self.pipeline.close_begins()
        with self.streams.on_reduction_stream():
            for bucket in self.buckets:
                if bucket.needs_reduce:
                    self.pipeline.launch(bucket)
                elif bucket.layout.nodes is not None and bucket.node_shard:
                    self.pipeline.launch_between(bucket, bucket.layout.nodes)
            self.pipeline.wait()

    def close(self) -> None:
        """Everything is in the shards, and the step follows."""
        self.streams.wait_for_reductions()
        self.pipeline.release_memory()
        if not self.shards.on_device:
            self.streams.host_waits_for_reductions()
        self.pipeline.ready_shards()
        for bucket in self.buckets:
            if not bucket.is_reduced:
                place = bucket.placement
                for part in self.shards.parts(bucket.layout, place.offset, place.width):
                    part.zero_()
            bucket.is_reduced = False
        if self.layouts:
            self._divide_by_items()
        self.shards.hand_over()
        self.norm_changed()
        self.pipeline.closed()

    @torch.no_grad()
    def _divide_by_items(self) -> None:
        """Let the shards, which have averages over the ranks, have the sums over the number of items."""
        items = self.items.total(zero.data_parallel_group(self.optimizer), self.layouts[0].params[0].device)
        self.items.reset()
        if items is None:
            return
        if not self.shards.on_device:
            items = items.cpu()
        for layout in self.layouts:
            # It has a dimension, so that torch multiplies in fp32: in fp16, one over the items has few bits.
            factor = torch.where(items > 0, layout.divisor / items, 0.0).view(1)
            for part in self.shards.parts(layout, 0, layout.shard_numel):
                part.mul_(factor.to(torch.promote_types(part.dtype, torch.float32)))

    def norm(self) -> torch.Tensor:
        """Return the L2 norm of the gradients in the shards, times the loss scale; infinity if it is not finite.

        The same on every rank, and computed once. A collective call after :meth:`close`. On a device with streams the
        host waits for it here, so that whoever asks about it, as DeepSpeed does up to three times a step, does not.
        """
        if self._norm is None:
            with phase("norm"):
                self._norm = norm = self.shards.norm()
                if self.streams.concurrent and not self.streams.is_on_host(norm):
                    self._host_norm.begin(norm.view(1))
                    self._norm = self._host_norm.arrived()[0].clone()
        return self._norm

    def norm_changed(self) -> None:
        """The gradients in the shards are others now."""
        self._norm = None

    def reset_counts(self) -> None:
        """The step has used the shards: count bytes from here."""
        self.pipeline.sent_floor = Sent()
        self.local.reset_peak()
        self.shards.stepped()

    # ---- dropping --------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Drop all gradients of this window, local and reduced; nobody waits for what is in flight."""
        self._to_stream.clear()
        self._has_streamed = self.only_adds = False
        self._late = None
        self.pipeline.drop()
        for gradient in self.gradients:
            gradient.came = False
        for bucket in self.buckets:
            bucket.free_gradients()
            for part in list(bucket.node_shard):
                bucket.take_node_sums(part)
            bucket.is_reduced = False
        self.items.reset()
        self.shards.discard()

    def interrupted(self) -> None:
        """An exception has ended a backward, at another place on each rank."""
        self.only_adds = False
        if self.is_native:
            if self.first_uses() is not None:
                self.pipeline.begun.expect()  # it gathers, too
            self.pipeline.begun.abort()

    def reset(self) -> None:
        """As :meth:`drop`, from whatever point an exception left."""
        if self.is_native:
            self.pipeline.begun.abort()
        self.drop()
        zero.reset_backward(self.optimizer)
