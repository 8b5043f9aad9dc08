"""The reduction: from full local gradients to this rank's shard of their average, every byte once.

Gradients are reduce-scattered bucket by bucket into the shard that DeepSpeed's step uses (``pipeline.py``). A reduction
of a bucket includes all its parameters, with zeros if this rank has no gradient. So ranks may use different parameters
(W4 needs no message), and no shard of an earlier window is stepped again. The host work of a reduction is proportional
to the number of parameters, and independent of the number of ranks (H1).
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from zerosync_strategy.core.comm.journal import phase
from zerosync_strategy.core.comm.nodes import MessageSizes, Sent
from zerosync_strategy.core.engine import zero
from zerosync_strategy.core.engine.hooks import GradientHooks
from zerosync_strategy.core.gradients.buckets import GradientBucket, Level, LocalGradient, bucket_limit, choose_levels
from zerosync_strategy.core.gradients.counts import NUMBERS, ItemCount, LastBackward
from zerosync_strategy.core.gradients.pipeline import ReductionPipeline
from zerosync_strategy.core.gradients.shards import GradientShards, Norm
from zerosync_strategy.core.options import ZeroSyncConfig

SMALL_BYTES = 4 * 2**20
"""Bytes of gradients that may form a single bucket. More bytes form four buckets or more: then the last backward can
reduce some of them, and packing a bucket copies at most a quarter of the gradients. DeepSpeed's bucket size is a bound,
too, but a parameter that exceeds it is sent in messages of at least this many bytes."""
KEPT_BUCKETS = 1
"""Reduced buckets of a backward whose memory is kept, so that its producers do not wait for it yet (L1)."""
FirstUses = Callable[[], Mapping[int, int]]
"""Returns, by ``id``, when the forward first used each parameter (``params/unit_order.py``)."""


class StepObserver(Protocol):
    """Looks at the gradients of each step, and adds to its report. ``attached/engine.py`` makes it."""

    def reduced(self) -> None:
        """Called when the shards have the averages of all ranks, before the program changes or clips them. Collective.

        Called again if the gradients are dropped and new ones come.
        """

    def report(self) -> dict[str, Any]:
        """Return attributes of the step's :class:`StepReport`. Sends nothing."""


class Reducer:
    """Reduces the local gradients of one DeepSpeed ZeRO optimizer, into its ``shards``.

    A gradient is local (in full, on its parameter) until it is reduced. Then its average is in this rank's shard.

    Attributes:
        norm: of the gradients in the shards, for readers after :meth:`settle`.
        items: counts the items over which the gradients of this window are a mean.
        observers: told when the shards have the averages of all ranks.
        bucket_bytes: most bytes of a bucket, and of a part of a larger parameter.
        only_adds: the running backward reduces nothing: no work is left for a gradient that has its ``tensor``.
    """

    def __init__(
        self, shards: GradientShards, config: ZeroSyncConfig, names: Mapping[nn.Parameter, str], sizes: MessageSizes,
        observers: Sequence[StepObserver],
    ) -> None:  # fmt: skip
        self.shards, self.optimizer, self.layouts = shards, shards.optimizer, shards.layouts
        self.params, self.streams, self.local = shards.params, shards.streams, shards.local
        self.is_native = bool(self.layouts) and all(layout.is_native for layout in self.layouts if layout.params)
        nbytes = sum(map(self.local.nbytes, self.params))
        largest = min(max(nbytes // 4, SMALL_BYTES), shards.most_bytes(config, sizes))
        limit = min(max(int(self.optimizer.reduce_bucket_size) * shards.dtype.itemsize, sizes.least), largest)
        self.bucket_bytes = chunk_bytes = min(largest, max(limit, SMALL_BYTES))
        common = {"chunk_bytes": chunk_bytes, "local": self.local, "streams": self.streams, "names": names}
        budget = config.gradients
        limit = bucket_limit(self.layouts, self.local, budget, limit)
        self.buckets = shards.make_buckets(config, limit, common)
        of_nodes = math.inf if budget.node is None else budget.node
        # One bucket at a time is streamed, and takes memory, too.
        room = math.inf if budget.device is None else budget.device - min(limit, budget.device)
        self.keep(room, None if budget.node_in_device else of_nodes)
        ordered = config.reduction == "ordered"
        for layout in self.layouts:
            layout.in_two_levels |= ordered
            if layout.params and layout.nodes is not None and (ordered or config.gradients.keeps_node_shards):
                layout.nodes.connect(layout.params[0].device)
        self.items = ItemCount(config.loss_reduction)
        self.norm = Norm(shards, NUMBERS)
        self.observers = observers
        self._may_stream = config.gradients.automatic  # the budget may change to one that streams
        self.gradients = [gradient for bucket in self.buckets for gradient in bucket.gradients]
        self._to_stream: deque[GradientBucket] = deque()  # in the running backward
        self._has_streamed = False
        self.only_adds = False
        self._has_streams = self.streams.concurrent
        self._hooks: GradientHooks | None = None  # while attached
        self._late: LocalGradient | None = None  # the gradient that began the backward, if its hooks may still run
        self._first_uses: FirstUses | None = None  # of a backward that streams by module, not by gradient
        self.pipeline = ReductionPipeline(shards, ordered, sizes)

    def gradients_floor(self) -> Sent:
        """Return what one rank must send to reduce all gradients once."""
        return functools.reduce(Sent.plus, (bucket.floor for bucket in self.buckets), Sent())

    # ---- backward --------------------------------------------------------------------------------------------------

    def attach(self, hook_of: Callable[[LocalGradient], Callable[[nn.Parameter], None]]) -> None:
        """Register the hooks: autograd calls that of a gradient after each accumulation."""
        self._hooks = GradientHooks(self.optimizer, [(each.param, hook_of(each)) for each in self.gradients])

    def detach(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()

    def begin_backward(self, last: bool, first_uses: FirstUses | None, ready: LocalGradient | None) -> None:
        """Prepare for a backward; ``last``: it is the window's last; ``ready``: a gradient that it has changed already.

        ``first_uses``: ``None`` if the backward gathers no parameters between its gradients.

        Raises a ``RuntimeError`` if the backward is being captured into a CUDA graph.
        """
        self.streams.refuse_capture("A backward")
        zero.expect_backward(self.optimizer)
        if self._hooks is not None and self._hooks.run_last():
            self._late = ready
        self._first_uses = first_uses
        for bucket in self.buckets:
            bucket.needs_reduce = True
        self._to_stream = deque(bucket for bucket in self.buckets if last or bucket.level is not Level.WHOLE)
        self.pipeline.closes = last
        if self._to_stream:
            for bucket in self._to_stream if self.streams.concurrent else ():
                bucket.is_fresh = all(gradient.tensor is None for gradient in bucket.gradients)
            self._choose_when_to_reduce(midway=ready is not None)
            self.pipeline.backward_begins()
            self.streams.reductions_wait_for_caller()
        self.only_adds = not self._to_stream and self._late is None

    def _choose_when_to_reduce(self, midway: bool) -> None:
        """Decide whether the running backward reduces a bucket when it is complete, or by the order of the modules.

        Without ZeRO-3, and where all parameters are held, the process group sends nothing else during the backward, so
        a fixed order of the buckets is enough. Otherwise gathers are issued between reductions, in the order of the
        modules, and gradients are completed at different points on different ranks: a rank may not use a parameter
        that another one uses (W4). Then a bucket is reduced after the backward has left the modules that use it.
        """
        if self._first_uses is None:
            for bucket in self._to_stream:
                bucket.pending = set(bucket.gradients)
            return
        first_uses = self._first_uses()
        for bucket in self._to_stream:
            # 0: reduced at the end, as no module has used it, or the backward was noticed too late.
            bucket.first_use = 0 if midway else min([first_uses.get(each, 0) for each in bucket.ids])
        self._to_stream = deque(sorted(self._to_stream, key=lambda bucket: -bucket.first_use))

    def gradient_ready(self, gradient: LocalGradient) -> bool:
        """Process an accumulation by autograd. Return whether :meth:`reduce_complete` has something to do."""
        gradient.came = True
        if gradient is self._late:
            return False
        bucket = gradient.bucket
        if gradient.tensor is None or gradient.param.grad is not gradient.tensor:
            bucket.collect(gradient)
        bucket.needs_reduce = True  # also if this backward has reduced the bucket and accumulates into it again
        if not self._to_stream:
            return False
        if self._has_streams:
            self.streams.record_grad_ready(bucket.grad_ready, bucket.spare_events)
        if self._first_uses is not None:
            return False
        bucket.pending -= {gradient}
        return not self._to_stream[0].pending

    def reduce_complete(self) -> None:
        """Reduce the complete buckets in their order, in a backward that streams."""
        self._stream(lambda bucket: not bucket.pending)

    def needs_reduce_behind(self, behind: int) -> bool:
        return bool(self._to_stream) and self._first_uses is not None and self._to_stream[0].first_use > behind

    def reduce_behind(self, behind: int) -> None:
        """Reduce the buckets first used after ``behind`` (the same on every rank), in a backward that streams."""
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

    def keep(self, room: float, of_nodes: float | None = None) -> int:
        """Choose, between two windows, where gradients stay unreduced, as in :func:`choose_levels`; return the bytes.

        Kept in full are those of the first parameters, which a backward completes last.
        """
        self.local.free_blocks()
        return choose_levels(reversed(self.buckets), room, of_nodes)

    @property
    def keeps_gradients(self) -> bool:
        """Whether a backward leaves every gradient on its parameter, unless taken for the window's last."""
        return (
            not self.local.converts
            and not self._may_stream
            and all(bucket.level is Level.WHOLE for bucket in self.buckets)
        )

    @property
    def keeps_some(self) -> bool:
        """Whether some gradients are not in the shards until the window closes."""
        return any(bucket.level is not Level.SHARD for bucket in self.buckets)

    @property
    def needs_reduce(self) -> bool:
        """Whether this rank has gradients that are not reduced."""
        return any(bucket.needs_reduce or bucket.node_shard for bucket in self.buckets)

    # ---- reduction -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce(self, every: bool) -> None:
        """Average the unreduced gradients over the ranks, into the shards. Collective.

        ``every``: of each bucket that no backward reduces as it goes; another rank may have gradients of it.
        """
        self.pipeline.close_begins()
        with self.streams.on_reduction_stream():
            for bucket in self.buckets:
                if bucket.needs_reduce or (every and bucket.level is Level.WHOLE):
                    self.pipeline.launch(bucket)
                elif bucket.layout.nodes is not None and bucket.node_shard:
                    self.pipeline.launch_between(bucket, bucket.layout.nodes)
            self.pipeline.wait()

    def settle(self, last: LastBackward) -> None:
        """Complete the shards, and begin the norm, with what this rank says of its backwards. Collective."""
        if last.overlaps:
            self.pipeline.begun.compare_aborted()  # what is sent from here on is not part of an aborted window
        if not self._asks(last):
            self._complete_shards()
        if self._norm_carries(last):
            self.norm.begin(last.numbers(self.needs_reduce))

    def hear(self, last: LastBackward) -> bool:
        """Return whether gradients of some rank are not reduced yet, so that all must go on. Collective."""
        if self._norm_carries(last):
            return last.hear(self.norm.heard())
        if not self._asks(last):
            return False
        if is_left := last.hear(self._ask(last.numbers(self.needs_reduce))):
            return is_left
        self._complete_shards()
        return False

    def agrees(self, last: LastBackward) -> bool:
        """Whether ranks say at the step what they have left; else they all have the same."""
        return self._norm_carries(last) or self._asks(last)

    def _norm_carries(self, last: LastBackward) -> bool:
        """Whether what ranks say goes with the norm."""
        return last.overlaps and self.shards.computes_norm and not self.items.counts and self.keeps_some

    def _asks(self, last: LastBackward) -> bool:
        """Whether what ranks say is a message of its own. A promise makes it needless."""
        return last.expects and not last.is_promised and self.keeps_some and not self._norm_carries(last)

    def _ask(self, numbers: Sequence[float]) -> list[float]:
        said = torch.tensor(numbers, dtype=torch.float64, device=self.layouts[0].params[0].device)
        with phase("agreement"):
            self.shards.sum_over_ranks(said)
        heard: list[float] = said.tolist()
        return heard

    def share_left(self) -> None:
        """Make all ranks reduce the buckets of which some rank has gradients left. Collective."""
        left = self._ask([bucket.needs_reduce or bool(bucket.node_shard) for bucket in self.buckets])
        for bucket, is_left in zip(self.buckets, left, strict=True):
            bucket.needs_reduce = bool(is_left) and (bucket.needs_reduce or not bucket.node_shard)
        self.pipeline.passes += 1

    def _complete_shards(self) -> None:
        """Hand the shards over to the step, with zeros where nothing was reduced. Collective where losses are sums."""
        self.streams.wait_for_reductions()
        self.pipeline.release_memory()
        if not self.shards.on_device:
            self.streams.host_waits_for_reductions()
        self.pipeline.ready_shards()
        for bucket in self.buckets:
            if not bucket.is_reduced:
                placement = bucket.placement
                for part in self.shards.parts(bucket.layout, placement.offset, placement.width):
                    part.zero_()
        if self.items.counts and self.layouts:
            self._divide_by_items()
        for observer in self.observers:
            observer.reduced()
        self.shards.hand_over()
        self.norm.changed()

    def close(self) -> None:
        """End the window, whose shards are complete."""
        for bucket in self.buckets:
            bucket.is_reduced = False
        self.pipeline.closed()

    @torch.no_grad()
    def _divide_by_items(self) -> None:
        """Turn the averages over the ranks, in the shards, into sums divided by the number of items."""
        items = self.items.take_total(self.layouts[0].params[0].device, self.shards.sum_over_ranks)
        if not self.shards.on_device:
            items = items.cpu()
        for layout in self.layouts:
            # A tensor of one dimension makes torch multiply in fp32: in fp16, one over the items has few bits.
            factor = torch.where(items > 0, layout.divisor / items, 0.0).view(1)
            for part in self.shards.parts(layout, 0, layout.shard_numel):
                part.mul_(factor.to(torch.promote_types(part.dtype, torch.float32)))

    def reset_counts(self) -> None:
        """Reset the counts of bytes, after the step has used the shards."""
        self.pipeline.sent_floor = Sent()
        self.local.reset_peak()
        self.shards.stepped()

    # ---- dropping --------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Drop all gradients of this window, local and reduced, without waiting for reductions in flight."""
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
        """Record that an exception has ended a backward or a reduction, at a different point on each rank."""
        self.only_adds = False
        if self.is_native:
            if self._first_uses is not None:
                self.pipeline.begun.expect()  # the backward may have issued gathers, too
            self.pipeline.begun.abort()

    def reset(self) -> None:
        """Do as :meth:`drop`, from any state that an exception has left."""
        self.drop()
        zero.reset_backward(self.optimizer)
