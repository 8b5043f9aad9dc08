"""Buckets: which gradients are reduced together, and when.

What is reduced when is the same on every rank without a message (W4). Buckets are in a fixed order, about that in which
backward completes their gradients. A backward may *stream* some of them: it reduces each as soon as its gradients and
the buckets before it are complete, or at its end. Which ones depends on the options and the layout alone:

- coalesced without a budget: none;
- without coalescing: all;
- with a budget: those that do not fit into it;
- in the backward that is known to be the last: all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.gradients.layout import ShardLayout
from zerosync_strategy.core.gradients.local import LocalGradients
from zerosync_strategy.core.options.config import ZeroSyncConfig

AUTO_BUCKETS = 16
"""Buckets at least, as far as parameters are that small, where the budget sets itself."""


@dataclass(frozen=True)
class Chunk:
    """What one reduction sends.

    Attributes:
        rows: a matrix of which rank r receives row r.
        offset: in this rank's shard, where the result goes.
    """

    rows: torch.Tensor
    offset: int


class Bucket(ABC):
    """Parameters of one layout whose gradients are reduced together.

    Args:
        layout: of the gradients.
        params: the parameters, in the order of the layout.
        deferred: their gradients may stay local until the window closes.
        chunk_bytes: of a chunk, where the bucket may be divided.
        local: counts the bytes of the gradients.
        streams: of the engine.
        names: of the parameters, for profiles and errors.

    Attributes:
        name, names: of its parameters the first and the last, for profiles and for errors.
        words: for its reduction in errors.
        needs_reduce: a backward has begun since the bucket was reduced last.
        is_reduced: this window has reduced it, so that its part of the shard has gradients already.
        numel, dtype: of its local gradients.
        pending: in a backward that reduces it when it is complete, the ids of parameters whose gradient is not.
        first_use: in one that reduces it by module, when the forward has used the first of its parameters.
        grad_ready: by stream, the event after the last of its gradients that a backward which reduces as it goes has
            completed there (B1).
        spare_events: by stream, its event, recorded or not.
        target: what it has of this rank's shard: the offset and the number of elements.
    """

    target: tuple[int, int]

    def __init__(
        self,
        layout: ShardLayout,
        params: Sequence[Any],
        deferred: bool,
        *,
        chunk_bytes: int,
        local: LocalGradients,
        streams: Streams,
        names: Mapping[Any, str],
    ) -> None:
        self.layout = layout
        self.params = list(params)
        self.deferred = deferred
        self.local = local
        self.streams = streams
        self.needs_reduce = False
        self.is_reduced = False
        self.pending: set[int] = set()
        self.first_use = 0
        self.grad_ready: dict[Any, Any] = {}
        self.spare_events: dict[Any, Any] = {}
        self.numel = sum(map(zero3.full_numel, params))
        self.dtype = local.dtype if local.converts else params[0].dtype
        first, last = (names.get(param, "a parameter") for param in (params[0], params[-1]))
        self.name = first if len(params) == 1 else f"{first} to {last}"
        self.names = repr(first) if len(params) == 1 else f"{first!r} to {last!r}"
        self.words = f"the reduction of the gradients of {self.names}"
        self._chunk_width = max(1, chunk_bytes // (layout.world_size * layout.dtype.itemsize))

    @abstractmethod
    def collect(self, param: Any) -> None:
        """Autograd has added to ``param.grad``: keep it where the bucket wants it."""

    def add(self, param: Any, gradient: torch.Tensor) -> None:
        """Add ``gradient``, in full, to that of ``param``, as autograd does; its memory stays the caller's."""
        if param.grad is None:
            with zero3.in_full_shape(param):
                param.grad = gradient.to(param.dtype, copy=True)
        else:
            param.grad.add_(gradient)

    @abstractmethod
    def chunks(self, before: float) -> Iterator[Chunk]:
        """Yield what to send, on the reduction stream: every gradient, times ``before``; zeros where there is none."""

    def _columns(self, rows: torch.Tensor, offset: int, width: int) -> Iterator[Chunk]:
        """Yield ``rows``, of which this rank's belongs at ``offset`` of its shard, by ``width`` columns."""
        for first in range(0, rows.shape[1], width):
            columns = rows[:, first : first + width]
            yield Chunk(columns.to(self.layout.dtype), offset + first)

    @abstractmethod
    def drop(self) -> None:
        """Forget the gradients."""

    def mark_reduced(self) -> None:
        """The gradients are reduced, or dropped."""
        self.needs_reduce = False
        self.grad_ready.clear()
        self.drop()


def choose_buckets(
    layouts: Sequence[ShardLayout], local: LocalGradients, config: ZeroSyncConfig, limit: int
) -> Iterator[tuple[Any, list[tuple[list[Any], bool]]]]:
    """Yield each layout with the parameters of its buckets, and whether they are deferred.

    Buckets come in about the order in which backward is expected to complete them.

    Args:
        layouts: of all gradients, in the order of the parameters.
        local: knows the bytes of each gradient.
        config: says what may be deferred.
        limit: bytes of a bucket with several parameters.
    """
    params = [param for layout in layouts for param in layout.params]
    nbytes = {param: local.nbytes(param) for param in params}
    deferred, limit = _choose_deferred(nbytes, config, limit)
    for layout in reversed(layouts):
        runs = _runs(layout.params, nbytes, limit, deferred)
        yield layout, [(members, members[0] in deferred) for members in runs]


def _runs(params: Sequence[Any], nbytes: Mapping[Any, int], limit: int, deferred: set[Any]) -> Iterator[list[Any]]:
    """Cut ``params`` into runs of at most ``limit`` bytes, or one parameter, of which all or none are deferred.

    From the last parameter to the first, which is about the order in which backward completes them; each run is in the
    order of ``params``.
    """
    members: list[Any] = []
    size = 0
    for param in reversed(params):
        if members and (size + nbytes[param] > limit or (param in deferred) != (members[-1] in deferred)):
            yield members[::-1]
            size, members = 0, []
        members.append(param)
        size += nbytes[param]
    if members:
        yield members[::-1]


def _choose_deferred(nbytes: Mapping[Any, int], config: ZeroSyncConfig, limit: int) -> tuple[set[Any], int]:
    """Return the parameters whose gradients may stay local until the window closes, and the bytes of a bucket.

    Args:
        nbytes: of each gradient, in the order of the model.
        config: says what may be deferred.
        limit: bytes of a bucket with several parameters.
    """
    budget = config.unreduced_bytes
    if not config.coalesce:
        return set(), limit
    if config.auto_gradients:  # small enough for a budget to fit in steps
        return set(), min(limit, max(sum(nbytes.values()) // AUTO_BUCKETS, 1))
    if budget is None:
        return set(nbytes), limit
    # What streams takes an eighth of the budget at most before it is reduced. What may be deferred is one run of
    # parameters, because each change between deferred and streamed ends a bucket. Backward completes it last.
    limit = min(limit, budget // 8)
    free = budget - limit
    deferred = set()
    for param, size in nbytes.items():
        free -= size
        if free < 0:
            break
        deferred.add(param)
    return deferred, limit
