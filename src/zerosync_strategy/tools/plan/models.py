"""The model that a plan names, one batch of it, and its loss."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from zerosync_strategy.tools.plan.jobs import Workload

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


def loss_of(module: Any, batch: Any) -> torch.Tensor:
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


def _batch_for(module: nn.Module, workload: Workload) -> Any:
    if hasattr(module, "get_input_embeddings"):
        tokens = torch.zeros(workload.batch, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}
    return (torch.randn(workload.batch),)
