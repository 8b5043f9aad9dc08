"""What is to be planned: a model, what one step of it does, and the options to compare."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from zerosync_strategy.tools.links import Links

STOCK, ZEROSYNC = "stock", "zerosync"
PREFIX, REPLAY, TIMED = "REPLAYED ", "replay", "timed"
"""How a line with a result begins, and of which kind it is."""
WITHIN, BETWEEN = " within nodes", " between nodes"
"""What follows the kind of a collective whose ranks are of one node, or one of each node, where nodes have several."""
NODE_SHARDS = {"device": 0, "node": "all"}
"""A budget that keeps all in node shards, and nothing in full."""
DTYPES = ("fp32", "bf16")
BACKENDS = ("nccl", "gloo")
CHANGES = "gather_changes"
ASSUMED_SHARE = 0.3
"""Of the bytes of a gather after a step, what its changes are taken to have. What a step changes is not replayed."""


class UsageError(ValueError):
    """What was asked for is not there: a model, a size of it, an optimizer. No fault of a replay."""


class LeftOut(ValueError):
    """An option set does not train under this optimizer, which needs whole parameters."""


@dataclass(frozen=True)
class Workload:
    """One optimizer step of a model on one rank.

    Attributes:
        model: ``"package.module:function"``, a transformers configuration's path, or ``"layers=32,hidden=4096,..."``.
        batch: shape of one micro-batch of one rank: of token numbers ``(samples, length)``, or of a float input.
        micro_batches: backwards per optimizer step.
        dtype: ``"fp32"`` or ``"bf16"``.
        optimizer: a class of ``torch.optim``, or ``"package.module:function"``, which makes one of the module.
        deepspeed: DeepSpeed's configuration beside what the other fields say; its stage is replaced.
    """

    model: str
    batch: tuple[int, ...] = (1, 2048)
    micro_batches: int = 1
    dtype: str = "bf16"
    optimizer: str = "AdamW"
    deepspeed: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype takes {' or '.join(DTYPES)}, got {self.dtype!r}.")
        if self.micro_batches < 1:
            raise ValueError(f"micro_batches takes 1 or more, got {self.micro_batches}.")
        if not self.batch or min(self.batch) < 1:
            raise ValueError(f"batch takes a shape of positive sizes, such as 1x2048, got {self.batch}.")


@dataclass(frozen=True)
class Cluster:
    """Where it is to run.

    Attributes:
        ranks: in all.
        ranks_per_node: of which so many share a node, in the order of their numbers.
        links: speeds; of links that were measured, those of their fast quartile.
        memory: bytes of one rank's device; ``None`` where nothing is to be compared with it.
        backend: ``"nccl"``, or ``"gloo"``, on which ranks send point to point.
        slow_links: those of their slow quartile; ``None``: as ``links``.
    """

    ranks: int
    ranks_per_node: int = 8
    links: Links = field(default_factory=Links)
    memory: int | None = None
    backend: str = "nccl"
    slow_links: Links | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend takes {' or '.join(BACKENDS)}, got {self.backend!r}.")
        if self.ranks < 2:
            raise ValueError(f"ranks takes 2 or more, got {self.ranks}: one rank sends nothing.")
        if self.ranks_per_node < 1 or (self.ranks > self.ranks_per_node and self.ranks % self.ranks_per_node):
            raise ValueError(
                f"ranks_per_node takes a divisor of ranks, got {self.ranks_per_node} with {self.ranks} ranks."
            )

    @property
    def per_node(self) -> int:
        """Ranks that share a node."""
        return min(self.ranks, self.ranks_per_node)

    @property
    def has_levels(self) -> bool:
        """Whether there are several nodes, with several ranks on each."""
        return 1 < self.per_node < self.ranks


@dataclass(frozen=True)
class OptionSet:
    """One way to train it.

    Attributes:
        system: ``"stock"`` DeepSpeed or ``"zerosync"``.
        stage: of ZeRO.
        options: ZeroSync's, as in its block. ``param_memory_budget``, or its part for the device, may be a part of all
            parameters, as a float. Nodes are the cluster's, unless ``node_size`` says otherwise.
    """

    system: str
    stage: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        given = ", ".join(f"{name}={_short(value)}" for name, value in self.options.items())
        given += f" ({ASSUMED_SHARE:.0%} of the gather assumed)" if self.options.get(CHANGES) else ""
        return f"{self.system} {self.stage}" + (f", {given}" if given else "")


@dataclass(frozen=True)
class Job:
    """What one process replays.

    Attributes:
        processes: replays at once.
        at_once: ranks that are timed at once, ``threads`` of torch each; 0: nothing is timed.
    """

    workload: Workload
    cluster: Cluster
    sets: tuple[OptionSet, ...]
    processes: int
    at_once: int = 0
    threads: int = 1


def _short(value: Any) -> str:
    if isinstance(value, dict):
        some = {where: size for where, size in value.items() if size != 0} or value
        return " + ".join(f"{_short(size)} on the {where}" for where, size in some.items())
    return f"{value:.0%}" if isinstance(value, float) else str(value)


def cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usual_sets(
    stages: tuple[int, ...] = (1, 2, 3), stock: bool = True, cluster: Cluster | None = None, dtype: str = DTYPES[0]
) -> list[OptionSet]:  # fmt: skip
    """Return ZeroSync on each of ``stages``, with the budgets that trade memory for bytes, and stock beside.

    Args:
        cluster: of several nodes with several ranks each: also with node shards, between what is whole on each rank and
            what is sharded over all.
        dtype: of the parameters; of 16 bits, also with the gather of changes.
    """
    has_levels = cluster is not None and cluster.has_levels
    sets = []
    for stage in stages:
        sets += [OptionSet(STOCK, stage)] if stock else []
        sets.append(OptionSet(ZEROSYNC, stage))
        if stage == 2 and dtype == "bf16":
            sets.append(OptionSet(ZEROSYNC, 2, {CHANGES: "auto"}))
        if stage == 2:
            sets += [OptionSet(ZEROSYNC, 2, {"grad_memory_budget": NODE_SHARDS})] if has_levels else []
            sets.append(OptionSet(ZEROSYNC, 2, {"grad_memory_budget": 0}))
        if stage == 3:
            sets += [OptionSet(ZEROSYNC, 3, {"param_memory_budget": part}) for part in (0.25, 0.5, "all")]
            sets.append(OptionSet(ZEROSYNC, 3, {"param_memory_budget": {"device": 0.25, "host": "all"}}))
            for params in ("all", {"device": 0.25, "node": "all"}, NODE_SHARDS) if has_levels else ():
                given = {"param_memory_budget": params, "grad_memory_budget": NODE_SHARDS}
                sets.append(OptionSet(ZEROSYNC, 3, given))
            sets.append(OptionSet(ZEROSYNC, 3, {"grad_memory_budget": 0}))
    return sets
