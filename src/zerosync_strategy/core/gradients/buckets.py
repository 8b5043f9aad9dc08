"""Buckets: which gradients are reduced together, and when.

What is reduced when is the same on every rank without a message (W4). Buckets are in a fixed order, about that in which
backward completes their gradients. A backward may *stream* some of them: it reduces each as soon as its gradients and
the buckets before it are complete, or at its end. Which ones depends on the options and the layout alone:

- coalesced without a budget: none;
- without coalescing: all;
- with a budget: those that do not fit into it;
- in the backward that is known to be the last: also those that are spread evenly over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zerosync_strategy.core.config import ZeroSyncConfig
from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.gradients.layout import ShardLayout
from zerosync_strategy.core.gradients.local import LocalGradients


class Bucket:
    """Parameters of one layout whose gradients are reduced together.

    Attributes:
        deferred: its gradients may stay local until the window closes.
        needs_reduce: a backward has begun since the bucket was reduced last.
        pending_params: parameters whose gradient the running backward has not completed.
        grad_ready: by stream, the event after the last of its gradients that was completed there and is not reduced
            yet (B1).
        evenly_sharded: no rank receives much more of it than the others. The last backward streams no other bucket: it
            would keep one link busy after the other, where the close keeps all busy.
    """

    def __init__(self, layout: ShardLayout, params: list[Any], deferred: bool, names: Mapping[Any, str]) -> None:
        self.layout = layout
        self.params = params
        self.deferred = deferred
        self.needs_reduce = False
        self.pending_params: set[Any] = set()
        self.grad_ready: dict[Any, Any] = {}
        first, last = (names.get(param, "a parameter") for param in (params[0], params[-1]))
        self.input = layout.input_of(params, first if len(params) == 1 else f"{first} to {last}")
        widths = self.input.widths
        self.evenly_sharded = max(widths) * len(widths) <= 1.25 * sum(widths)

    def begin_backward(self) -> None:
        """A backward begins, and may complete any of the gradients."""
        self.needs_reduce = True
        self.pending_params = set(self.params)

    def mark_reduced(self) -> None:
        """The gradients are reduced, or dropped."""
        self.needs_reduce = False
        self.grad_ready.clear()


def make_buckets(
    layouts: Sequence[ShardLayout], local: LocalGradients, config: ZeroSyncConfig, limit: int, names: Mapping[Any, str]
) -> list[Bucket]:
    """Return the buckets in the order in which backward is expected to complete them.

    Args:
        layouts: of all gradients, in the order of the parameters.
        local: knows the bytes of each gradient.
        config: says what may be deferred.
        limit: bytes of a bucket with several parameters.
        names: of the parameters, for profiles.
    """
    params = [param for layout in layouts for param in layout.params]
    budget = config.unreduced_bytes
    deferred = set(params) if config.coalesce else set()
    if config.coalesce and budget is not None:
        # What streams takes an eighth of the budget at most before it is reduced. What may be deferred is one run of
        # parameters, because each change between deferred and streamed ends a bucket. Backward completes it last.
        limit = min(limit, budget // 8)
        free, deferred = budget - limit, set()
        for param in params:
            free -= local.nbytes(param)
            if free < 0:
                break
            deferred.add(param)
    buckets: list[Bucket] = []
    for layout in reversed(layouts):
        size = 0
        members: list[Any] = []
        for param in reversed(layout.params):
            is_deferred = param in deferred
            if members and (size + local.nbytes(param) > limit or is_deferred != (members[-1] in deferred)):
                buckets.append(Bucket(layout, members, members[-1] in deferred, names))
                size, members = 0, []
            members.append(param)
            size += local.nbytes(param)
        if members:
            buckets.append(Bucket(layout, members, members[-1] in deferred, names))
    # With several layouts under ZeRO-3, those of the later modules first; else as they are.
    return sorted(buckets, key=lambda bucket: -max(map(zero3.param_id, bucket.params)))
