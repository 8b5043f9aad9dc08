"""The input of a plan: a model, its optimizer step, the cluster, and the options to compare."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

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


def _short(value: object) -> str:
    if isinstance(value, dict):
        some = {where: size for where, size in value.items() if size != 0} or value
        return " + ".join(f"{_short(size)} on the {where}" for where, size in some.items())
    return f"{value:.0%}" if isinstance(value, float) else str(value)


def usual_sets(
    stages: tuple[int, ...] = (1, 2, 3),
    stock: bool = True,
    cluster: Cluster | None = None,
    block: Mapping[str, object] | None = None,
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


# ---- the model, one batch of it, and its loss ------------------------------------------------------------------------


# By name, the field of a Llama configuration; checkpointing=1: activation checkpointing by block.
_SIZES = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "vocab": "vocab_size",
    "intermediate": "intermediate_size", "checkpointing": "checkpointing",
}  # fmt: skip


def build(workload: Workload) -> tuple[nn.Module, Any]:
    """Return the model in the workload's dtype, and one micro-batch: a mapping, or a tuple of positional arguments."""
    text = workload.model
    made = imported(text)() if _is_function(text) else _of_transformers(text)
    module, batch = made if isinstance(made, tuple) else (made, _batch_for(made, workload))
    batch = batch if isinstance(batch, (Mapping, tuple, list)) else (batch,)
    if workload.dtype == "bf16":
        module = module.to(torch.bfloat16)
        batch = tree_map(
            lambda each: each.bfloat16() if torch.is_tensor(each) and each.is_floating_point() else each, batch
        )
    return module, batch


def preload(workload: Workload) -> None:
    """Import what :func:`build` imports of transformers, for all forks of this process: it takes seconds.

    A function of the user is left to the forks, because threads that its module starts do not survive one. So are
    errors, which name the option set there.
    """
    if not _is_function(workload.model):
        with contextlib.suppress(Exception), torch.device("meta"):
            _of_transformers(workload.model)


def imported(text: str) -> Any:
    """Import the function named ``"package.module:function"``."""
    module, _, name = text.partition(":")
    return getattr(import_module(module), name)


def loss_of(module: nn.Module, batch: Any) -> torch.Tensor:
    """Return a scalar of one forward: the model's own loss if it returns one, else the mean of its first output."""
    output = module(**batch) if isinstance(batch, Mapping) else module(*batch)
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    while isinstance(output, (tuple, list)):
        output = output[0]
    return output if output.dim() == 0 else output.float().mean()


def _is_function(text: str) -> bool:
    return ":" in text and not Path(text).exists()


def _of_transformers(text: str) -> nn.Module:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    if "=" in text:
        fields = _sizes(text)
    else:
        path = Path(text)
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(
                f"{text!r} is no package.module:function, configuration, or layers=32,hidden=4096,heads=32"
            )
        fields = json.loads(file.read_text())
    recomputes = fields.pop("checkpointing", False)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    try:
        module = AutoModelForCausalLM.from_config(config)
    except ValueError:
        module = AutoModel.from_config(config)
    if recomputes:
        module.gradient_checkpointing_enable()
    return module


def _sizes(text: str) -> dict[str, Any]:
    """Return a Llama configuration with the sizes in ``text``."""
    sizes = {"vocab": 32_000}
    for pair in text.split(","):
        name, _, value = map(str.strip, pair.partition("="))
        if name not in _SIZES or not value.isdigit():
            raise ValueError(f"sizes take {', '.join(_SIZES)} with whole numbers, got {pair!r}.")
        sizes[name] = int(value)
    if missing := [name for name in ("layers", "hidden", "heads") if not sizes.get(name)]:
        raise ValueError(f"sizes lack {', '.join(missing)}: give layers=32,hidden=4096,heads=32.")
    sizes.setdefault("intermediate", 8 * sizes["hidden"] // 3)
    return {"model_type": "llama", "use_cache": False} | {_SIZES[name]: size for name, size in sizes.items()}


def _batch_for(module: nn.Module, workload: Workload) -> dict[str, torch.Tensor] | tuple[torch.Tensor, ...]:
    if hasattr(module, "get_input_embeddings"):
        tokens = torch.zeros(workload.batch, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}
    return (torch.randn(workload.batch),)
