"""The model that a plan names, one batch of it, and its loss. Imported in the process of the replay alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from zerosync_strategy.tools.plan.jobs import UsageError, Workload

_SIZES = {"layers": 0, "hidden": 0, "heads": 0, "vocab": 32_000, "intermediate": 0, "checkpointing": 0}


def build(workload: Workload) -> tuple[nn.Module, Any]:
    """Return the model in the workload's dtype, and one micro-batch: a mapping, or a tuple of positional arguments.

    Raises:
        UsageError: ``workload.model`` names nothing of that kind.
    """
    text = workload.model
    if "=" in text:
        made: Any = _Decoder(**_sizes(text))
    elif ":" in text and not Path(text).exists():
        made = imported("model", text)()
    else:
        made = _of_transformers(Path(text))
    module, batch = made if isinstance(made, tuple) else (made, None)
    if workload.dtype == "bf16":
        module = module.to(torch.bfloat16)
    return module, _batch_for(module, workload) if batch is None else _cast(batch, workload)


def imported(what: str, text: str) -> Any:
    """Return the function that is named ``"package.module:function"``.

    Raises:
        UsageError: there is none.
    """
    module, _, name = text.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as problem:
        raise UsageError(f"{what} {text!r}: {problem}. Give package.module:function, found from here.") from problem


def loss_of(module: Any, batch: Any) -> torch.Tensor:
    """Return a scalar of one forward: the model's own loss where it has one, else the mean of what it returns."""
    output = module(**batch) if isinstance(batch, Mapping) else module(*batch)
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    while isinstance(output, (tuple, list)):
        output = output[0]
    return output if output.dim() == 0 else output.float().mean()


def shape_of(batch: Any) -> list[int]:
    """Return the shape of the first tensor of a micro-batch; empty where there is none."""
    values = batch.values() if isinstance(batch, Mapping) else batch
    return next((list(value.shape) for value in values if isinstance(value, torch.Tensor)), [])


def _of_transformers(path: Path) -> nn.Module:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(
            f"model {str(path)!r} is neither package.module:function, nor a file or folder of a transformers"
            " configuration, nor sizes such as layers=32,hidden=4096,heads=32."
        )
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    given = json.loads(file.read_text())
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    try:
        return AutoModelForCausalLM.from_config(config)
    except ValueError:
        return AutoModel.from_config(config)


def _batch_for(module: nn.Module, workload: Workload) -> Any:
    if isinstance(module, _Decoder) or hasattr(module, "get_input_embeddings"):
        tokens = torch.zeros(workload.batch, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}
    return _cast((torch.randn(workload.batch),), workload)


def _cast(batch: Any, workload: Workload) -> Any:
    def cast(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(torch.bfloat16) if floats and workload.dtype == "bf16" else value

    if isinstance(batch, Mapping):
        return {name: cast(value) for name, value in batch.items()}
    return tuple(cast(value) for value in (batch if isinstance(batch, (tuple, list)) else (batch,)))


def _sizes(text: str) -> dict[str, int]:
    sizes = dict(_SIZES)
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        if name.strip() not in sizes or not value.strip().isdigit():
            raise UsageError(f"sizes take {', '.join(_SIZES)} with whole numbers, got {pair!r}.")
        sizes[name.strip()] = int(value)
    if missing := [name for name in ("layers", "hidden", "heads") if not sizes[name]]:
        raise UsageError(f"sizes lack {', '.join(missing)}: give layers=32,hidden=4096,heads=32.")
    if sizes["hidden"] % sizes["heads"]:
        raise UsageError(f"hidden={sizes['hidden']} is no multiple of heads={sizes['heads']}.")
    return {**sizes, "intermediate": sizes["intermediate"] or 4 * sizes["hidden"]}


class _Block(nn.Module):
    def __init__(self, hidden: int, heads: int, intermediate: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, intermediate), nn.GELU(), nn.Linear(intermediate, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.before_attention(x)).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        mixed: torch.Tensor = x + self.mlp(self.before_mlp(x))
        return mixed


class _Decoder(nn.Module):
    """A plain GPT of given sizes, without positions, whose head is not tied.

    Args:
        checkpointing: 1: activation checkpointing, block by block.
    """

    def __init__(self, layers: int, hidden: int, heads: int, vocab: int, intermediate: int, checkpointing: int) -> None:
        super().__init__()
        self._recomputes = bool(checkpointing)
        self.embedding = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(_Block(hidden, heads, intermediate) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._recomputes else block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
