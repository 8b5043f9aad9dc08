"""Gradient buckets: which gradients are reduced together, and when.

All ranks reduce the same buckets at the same points, without a message (W4). The order of the buckets is fixed; it
approximates the order in which backward completes their gradients. A backward may *stream* some buckets: it reduces
each as soon as the gradients of that bucket and of all buckets before it are complete, or else at its end. The options
and the layout alone determine which buckets are streamed: those that do not fit into the budget, which is 0 without
coalescing; all in the backward that is known to be the last.

Gradients stay where autograd accumulates them. One call packs the gradients of a bucket when it is reduced.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from zerosync_strategy.core.comm.journal import OfReduction
from zerosync_strategy.core.comm.nodes import Nodes, Sent
from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.engine import zero, zero3
from zerosync_strategy.core.engine.types import ZeroOptimizer
from zerosync_strategy.core.engine.zero import in_chunks
from zerosync_strategy.core.gradients.layout import Placement, ReduceScatterInput, Scaling, ShardLayout, ShardPart
from zerosync_strategy.core.options import Budget

_LARGE_BYTES = 2**18  # the C library keeps smaller blocks when they are freed
_UNUSED = 2  # references to the storage of an unused block: the kept tensor's, and the one that asks


class LocalGradient:
    """The unreduced gradient of one parameter, until ``bucket`` is reduced. It takes ``nbytes`` once it is allocated.

    Attributes:
        tensor: holds it, once this window has collected it; while it is ``param.grad``, autograd accumulates into it.
        came: something was added since the last step.
    """

    __slots__ = ("bucket", "came", "nbytes", "param", "tensor")

    def __init__(self, param: nn.Parameter, bucket: GradientBucket, nbytes: int) -> None:
        self.param, self.bucket, self.nbytes = param, bucket, nbytes
        self.tensor: torch.Tensor | None = None
        self.came = False


class LocalGradients:
    """What the unreduced gradients have in common.

    Attributes:
        dtype: in which they are accumulated.
        converts: ``dtype`` differs from the parameters' dtype; then ``param.grad`` is ``None`` between two backwards.
        now, peak_bytes: their bytes now, and at the peak since :meth:`reset_peak`.
        watch: called before bytes are counted.
    """

    def __init__(self, optimizer: ZeroOptimizer, streams: Streams) -> None:
        self.dtype = zero.accumulation_dtype(optimizer)
        self.converts = self.dtype != optimizer.dtype
        self.now = self._peak = 0
        self.watch: Callable[[], None] | None = None
        self._streams = streams
        self._blocks: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def nbytes(self, param: nn.Parameter) -> int:
        return zero3.full_numel(param) * self.dtype.itemsize

    def count(self, nbytes: int) -> None:
        """Count allocated bytes, or freed ones if negative."""
        if self.watch is not None:
            self.watch()
        self._peak = self.peak_bytes
        self.now += nbytes

    @property
    def peak_bytes(self) -> int:
        return max(self._peak, self.now)

    def reset_peak(self) -> None:
        self._peak = 0

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised flat tensor, in memory that nothing else uses. Its bytes are not counted."""
        is_small = numel * dtype.itemsize < _LARGE_BYTES
        if is_small or device.type != "cpu" or self._streams.run_on(device):
            return torch.empty(numel, dtype=dtype, device=device)
        blocks = self._blocks.setdefault((numel, dtype), [])
        for block in blocks:
            if torch._C._storage_Use_Count(block.untyped_storage()._cdata) == _UNUSED:
                return block.view(-1)
        blocks.append(torch.empty(numel, dtype=dtype))
        return blocks[-1].view(-1)

    def free_blocks(self) -> None:
        """Free the unused blocks; each of the others is freed with the last reference to it."""
        self._blocks.clear()


AUTO_BUCKETS = 16
"""Least number of buckets with an automatic budget; fewer if parameters are too large for that."""


class Level(enum.Enum):
    """Where a window accumulates a bucket's gradients. Each level takes less memory than the last, and sends more."""

    WHOLE = enum.auto()  # on each rank, in full: reduced once, at the close
    NODE = enum.auto()  # in node shards: reduced within the node in each backward, and between nodes at the close
    SHARD = enum.auto()  # in ZeRO's own shards: reduced in each backward


class GradientBucket:
    """Parameters of one layout whose gradients are reduced together.

    Args:
        chunk_bytes: at most, of one reduce-scatter, if the bucket can be divided.
        below: the bucket that reduces the head (the first elements) of this one, if it has a head (``stage12.py``).

    Attributes:
        params, gradients: in the order of the layout.
        placement: where the gradients belong.
        floor: the minimum that one rank sends to reduce the bucket once.
        level: where gradients are accumulated; :func:`choose_levels` can change it between two windows.
        name, names, label: the first and last parameter, for profiles and for errors; the reduction, for errors.
        needs_reduce: a backward has begun since the bucket was last reduced.
        node_shard: the node shard (``comm/nodes.py``): by part, the sums over this window, scaled as they are sent.
        is_reduced: this window has reduced the bucket, so its part of the shard already holds gradients.
        dtype: of its local gradients.
        pending: in a backward that reduces the bucket when it is complete, the gradients still to be completed.
        first_use: in a backward that reduces by module, when the forward first used one of the parameters.
        grad_ready, spare_events: by stream, the event after the last gradient that a streaming backward has completed
            on it (B1); and the event to record for the next gradient.
        is_fresh: all its gradients were allocated in the running backward, which also reduces the bucket.
        read: gradients that the reduction stream is about to read (L1).
    """

    def __init__(
        self, layout: ShardLayout, params: Sequence[nn.Parameter], placement: Placement, floor: Sent, *,
        chunk_bytes: int, local: LocalGradients, streams: Streams, names: Mapping[nn.Parameter, str],
        below: GradientBucket | None = None,
    ) -> None:  # fmt: skip
        self.layout, self.placement, self.floor = layout, placement, floor
        self.params, self.ids = list(params), list(map(id, params))
        self.gradients = [LocalGradient(param, self, local.nbytes(param)) for param in self.params]
        of_param = dict(zip(self.params, self.gradients, strict=True))
        self._packs = [of_param[param] for param in placement.order]
        self._below = below
        self._from_above: torch.Tensor | None = None  # the head of the bucket above, which this bucket reduces
        self.level = Level.SHARD
        self.node_shard: dict[ShardPart, torch.Tensor] = {}
        self.local = local
        self.streams = streams
        self.needs_reduce = False
        self.is_reduced = False
        self.pending: set[LocalGradient] = set()
        self.first_use = 0
        self.grad_ready: dict[torch.Stream, torch.Event] = {}
        self.spare_events: dict[torch.Stream, torch.Event] = {}
        self.is_fresh = False
        self.read: list[torch.Tensor] = []
        self.dtype = local.dtype if local.converts else params[0].dtype
        first, last = (names.get(param, "a parameter") for param in (params[0], params[-1]))
        self.name = first if len(params) == 1 else f"{first} to {last}"
        self.names = repr(first) if len(params) == 1 else f"{first!r} to {last!r}"
        self.label = OfReduction(f"the reduction of the gradients of {self.names}")
        self._chunk_width = max(1, chunk_bytes // (layout.world_size * layout.dtype.itemsize))

    def collect(self, gradient: LocalGradient) -> None:
        """Take an accumulation from ``param.grad``: convert it to the accumulation dtype, and count its memory."""
        param, held = gradient.param, gradient.tensor
        found = param.grad
        if found is held and held is not None:
            return
        if found is None:
            if self.local.converts and held is not None:  # a hook has set param.grad to None
                self.local.count(-gradient.nbytes)
                gradient.tensor = None
            return
        if self.local.converts:
            more = found.detach().to(self.local.dtype)
            found = more if held is None else held.add_(more)
            param.grad = None
        if held is None:
            if (local := self.local).watch is not None:
                local.watch()
            local.now += gradient.nbytes  # count() in no call: this is done for each gradient
        gradient.tensor = found

    def take_head(self, head: torch.Tensor) -> None:
        """Reduce ``head``, too: the first elements of the bucket above, which is reduced before this one."""
        self._from_above = head.clone() if self._from_above is None else self._from_above.add_(head)
        self.needs_reduce = True

    def reduce_scatter_inputs(self, factor: float) -> Iterator[ReduceScatterInput]:
        """Yield all gradients times ``factor``, with zeros for missing ones. Runs on the reduction stream."""
        with zero3.as_it_is():
            gradients = [each.tensor if self.local.converts else each.param.grad for each in self._packs]
        if self.streams.concurrent:
            self.read += [gradient for gradient in gradients if gradient is not None]
        memory, head = self.placement.pack(gradients, self.dtype, self._from_above), self.placement.head
        if head and self._below is not None:
            self._below.take_head(memory[:head])
        if self.placement.is_empty:
            return
        scaling = Scaling(factor, is_packed=len(gradients) > 1)
        yield from self.placement.inputs(memory[head:], self._chunk_width, self.nodes, scaling)

    # ---- in two levels ---------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> Nodes | None:
        """The nodes within and between which the bucket is reduced; ``None``: reduced over all ranks at once."""
        nodes = self.layout.nodes
        return nodes if self.level is Level.NODE or self.layout.in_two_levels else None

    def keep_node_sums(self, part: ShardPart, sums: torch.Tensor) -> None:
        if part in self.node_shard:
            self.node_shard[part].add_(sums)
        else:
            self.node_shard[part] = kept = sums.to(self.local.dtype)
            self.local.count(kept.nbytes)

    def take_node_sums(self, part: ShardPart) -> torch.Tensor | None:
        """Remove and return the sums that the node shard holds for ``part``."""
        sums = self.node_shard.pop(part, None)
        if sums is not None:
            self.local.count(-sums.nbytes)
        return sums

    def free_gradients(self) -> None:
        self.needs_reduce = self.is_fresh = False
        self.grad_ready.clear()
        self._from_above = None
        self.local.count(-sum([each.nbytes for each in self.gradients if each.tensor is not None]))
        with zero3.as_it_is():
            for gradient in self.gradients:
                gradient.tensor = gradient.param.grad = None


def cut_into_buckets(
    layouts: Sequence[ShardLayout], local: LocalGradients, limit: int
) -> Iterator[tuple[ShardLayout, list[list[nn.Parameter]]]]:
    """Yield the layouts, last first, each with the parameters of its buckets in the order of the layout.

    Backward is expected to complete them from last to first. A bucket has at most ``limit`` bytes, or one parameter.
    """
    for layout in reversed(layouts):
        yield layout, [params[::-1] for params in in_chunks(reversed(layout.params), limit, local.nbytes)][::-1]


def bucket_limit(layouts: Sequence[ShardLayout], local: LocalGradients, budget: Budget, limit: int) -> int:
    """Return the most bytes of a bucket: ``limit``, or less where a ``budget`` is to be kept with small buckets."""
    if not budget.sizes_buckets or budget.device is None:
        return limit
    nbytes = {layout: sum(map(local.nbytes, layout.params)) for layout in layouts}
    if budget.automatic:  # so that the budget can be set in small steps
        return min(limit, max(sum(nbytes.values()) // AUTO_BUCKETS, 1))
    # A streamed bucket holds at most an eighth of the bytes that may stay unreduced. Node shards count with their full
    # gradients, so the number of buckets does not depend on the node size (H1).
    on_nodes = {layout: size for layout, size in nbytes.items() if layout.nodes is not None}
    everything = sum(layout.in_node_shard(size) for layout, size in on_nodes.items())
    of_nodes = everything if budget.node is None else budget.node
    return min(limit, (budget.device + of_nodes * sum(on_nodes.values()) // max(everything, 1)) // 8)


def choose_levels(buckets: Iterable[GradientBucket], room: float, of_nodes: float | None = None) -> int:
    """Choose where each bucket's gradients stay, in ``room`` bytes, the same on all ranks; return the bytes kept.

    The first ``buckets`` are kept in full, and the next in node shards, of ``of_nodes`` bytes beside the ``room``.
    ``None``: they are part of it and have priority, because they save as much between nodes, with less memory.
    """
    nbytes = {bucket: sum(gradient.nbytes for gradient in bucket.gradients) for bucket in buckets}
    in_shards = {
        bucket: bucket.layout.in_node_shard(size) for bucket, size in nbytes.items() if bucket.layout.nodes is not None
    }
    more = dict(nbytes)  # bytes that a bucket takes in full, beside what is set aside for node shards
    if of_nodes is None:
        everything = sum(in_shards.values())
        of_nodes, room = min(everything, room), room - everything
        more = {bucket: size - in_shards.get(bucket, 0) for bucket, size in nbytes.items()}
    kept = 0
    for bucket, size in nbytes.items():
        room -= more[bucket]
        if room >= 0:
            bucket.level, kept = Level.WHOLE, kept + size
            continue
        room = -1  # no later bucket is kept in full
        bucket.level = Level.SHARD
        if of_nodes > 0 and bucket in in_shards and (of_nodes := of_nodes - in_shards[bucket]) >= 0:
            bucket.level, kept = Level.NODE, kept + in_shards[bucket]
    return kept
