"""Which modules of ZeRO-3 have all their parameters held or persistent, and by which messages these are gathered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zerosync_strategy.core.engine import gathering, zero3
from zerosync_strategy.core.params.held import HoldPlan
from zerosync_strategy.core.params.scheduler import GatherScheduler


@dataclass
class Bucket:
    """Parameters that are gathered by one message.

    Attributes:
        place: among all buckets; those of a process group follow each other.
        group: the place of the process group in the order of gathers (U1).
        params: in the order in which they were built.
        issued: in this window: what was missing is gathered, or on its way.
    """

    place: int
    group: int
    params: list[Any]
    issued: bool = False


@dataclass
class HeldModule:
    """A module whose parameters are all held or persistent.

    ``pending``: in this window, it has not waited for them yet, or they may not be there on every stream.
    """

    params: list[Any]
    buckets: list[Bucket]
    pending: bool = True


def held_modules(root: Any, plan: HoldPlan, scheduler: GatherScheduler) -> tuple[list[Bucket], dict[Any, HeldModule]]:
    """Return the buckets of what is held of ``root``, the engine's module, and its modules that need nothing else."""
    below_leaves = {id(below) for leaf in root.modules() for below in gathering.modules_of(leaf) if below is not leaf}
    held = {}
    for module in root.modules():
        params = list(filter(zero3.is_sharded, gathering.parameters_of(module)))
        # DeepSpeed may come to gather for the model, or a module without parameters, what is in another's output.
        # A module below a leaf has no hooks.
        has_hooks = params and module is not root and id(module) not in below_leaves
        stay = all(zero3.is_persistent(param) or param._zerosync_record.hold for param in params)
        if plan.holds_all or (has_hooks and stay):
            held[module] = sorted(params, key=zero3.param_id)
    by_id = {zero3.param_id(param): param for params in held.values() for param in params}
    buckets: list[Bucket] = []
    bucket_of: dict[int, Bucket] = {}
    for trains in (True, False):  # apart, since those that are frozen are gathered once
        params = [param for param in by_id.values() if param.requires_grad == trains]
        for group, runs in scheduler.runs(params):
            for run in runs:
                bucket = Bucket(len(buckets), group, run)
                buckets.append(bucket)
                for param in run:
                    bucket_of[zero3.param_id(param)] = bucket
                    # Else a weight may also be that of a module whose other parameters are not held.
                    param._zerosync_record.linear_is_plain = plan.holds_all
    modules = {}
    for module, params in held.items():
        places = {bucket_of[zero3.param_id(param)].place for param in params}
        modules[module] = HeldModule(params, [buckets[place] for place in sorted(places)])
    return buckets, modules
