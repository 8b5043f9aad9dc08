"""The input of a plan: a model, its optimizer step, the cluster, and the options to compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STOCK, ZEROSYNC = "stock", "zerosync"
_CHECKPOINTS = "checkpoint_"
NODE_SHARDS = {"device": 0, "node": "all"}
"""A budget that keeps everything in node shards, and nothing in full."""


@dataclass(frozen=True)
class Workload:
    """One optimizer step of a model on one rank.

    Attributes:
        model: ``"package.module:function"``, a transformers configuration's path, or ``"layers=32,hidden=4096,..."``.
        batch: shape of one micro-batch of one rank: of token ids ``(samples, length)``, or of a float input.
        micro_batches: backwards per optimizer step.
        dtype: ``"fp32"`` or ``"bf16"``.
        optimizer: a class of ``torch.optim``, or ``"package.module:function"``, which makes one from the module.
        deepspeed: a DeepSpeed configuration; the other fields and the stage of the option set override it.
    """

    model: str
    batch: tuple[int, ...] = (1, 2048)
    micro_batches: int = 1
    dtype: str = "bf16"
    optimizer: str = "AdamW"
    deepspeed: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dtype not in ("fp32", "bf16"):
            raise ValueError(f"dtype takes fp32 or bf16, got {self.dtype!r}.")
        if self.micro_batches < 1:
            raise ValueError(f"micro_batches takes 1 or more, got {self.micro_batches}.")
        if not self.batch or min(self.batch) < 1:
            raise ValueError(f"batch takes a shape of positive sizes, such as 1x2048, got {self.batch}.")


@dataclass(frozen=True)
class Cluster:
    """The cluster of a plan.

    Attributes:
        ranks: number of all ranks.
        ranks_per_node: number of consecutive ranks that share a node.
        memory: bytes of one rank's device; ``None``: no comparison with it.
        backend: ``"nccl"``, or ``"gloo"``, on which ranks send point to point.
    """

    ranks: int
    ranks_per_node: int = 8
    memory: int | None = None
    backend: str = "nccl"

    def __post_init__(self) -> None:
        if self.backend not in ("nccl", "gloo"):
            raise ValueError(f"backend takes nccl or gloo, got {self.backend!r}.")
        if self.ranks < 2:
            raise ValueError(f"ranks takes 2 or more, got {self.ranks}: one rank sends nothing.")
        if self.ranks_per_node < 1 or self.ranks % self.per_node:
            raise ValueError(f"ranks_per_node takes a divisor of {self.ranks} ranks, got {self.ranks_per_node}.")

    @property
    def per_node(self) -> int:
        """Ranks that share a node."""
        return min(self.ranks, self.ranks_per_node)


@dataclass(frozen=True)
class OptionSet:
    """One way to train a workload.

    Attributes:
        system: ``"stock"`` DeepSpeed or ``"zerosync"``.
        stage: of ZeRO.
        options: ZeroSync's options, as in its block. ``param_memory_budget``, or its value for the device, may be a
            fraction of all parameters, as a float. Nodes are those of the cluster, unless ``node_size`` is given.
    """

    system: str
    stage: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The system, the stage, and the options but for those of checkpoints, on which no step depends."""
        shown = {name: value for name, value in self.options.items() if not name.startswith(_CHECKPOINTS)}
        given = [f", {name}={_short(value)}" for name, value in shown.items()]
        return f"{self.system} {self.stage}{''.join(given)}"


def _short(value: Any) -> str:
    if isinstance(value, dict):
        some = {where: size for where, size in value.items() if size != 0} or value
        return " + ".join(f"{_short(size)} on the {where}" for where, size in some.items())
    return f"{value:.0%}" if isinstance(value, float) else str(value)


def usual_sets(
    stages: tuple[int, ...] = (1, 2, 3),
    stock: bool = True,
    cluster: Cluster | None = None,
    block: Mapping[str, Any] | None = None,
) -> list[OptionSet]:
    """Return option sets for each of ``stages``: ZeroSync with budgets that trade memory for bytes, and stock.

    On a ``cluster`` of several nodes with several ranks each, some sets also have node shards. ``block``: a
    configuration's options of ZeroSync; each set has those of checkpoints.
    """
    of_checkpoints = {name: value for name, value in (block or {}).items() if name.startswith(_CHECKPOINTS)}
    params: list[Any] = [0.25, 0.5, "all", {"device": 0.25, "host": "all"}]
    of_stage: dict[int, list[dict[str, Any]]] = {1: [], 2: [], 3: [{"param_memory_budget": each} for each in params]}
    if cluster is not None and 1 < cluster.per_node < cluster.ranks:
        in_shards = {"grad_memory_budget": NODE_SHARDS}
        of_stage[2].append(in_shards)
        for each in ("all", {"device": 0.25, "node": "all"}, NODE_SHARDS):
            of_stage[3].append({"param_memory_budget": each} | in_shards)
    sets = []
    for stage in stages:
        streamed = [{"grad_memory_budget": 0}] if stage > 1 else []
        sets += [OptionSet(STOCK, stage)] if stock else []
        sets += [OptionSet(ZEROSYNC, stage, options | of_checkpoints) for options in [{}, *of_stage[stage], *streamed]]
    return sets
