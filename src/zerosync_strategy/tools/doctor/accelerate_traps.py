"""Traps in the YAML of ``accelerate launch``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerosync_strategy.tools.doctor import deepspeed_traps
from zerosync_strategy.tools.doctor.findings import Finding, error, note

TOPIC = "configuration"
_IN_BOTH = (
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "zero3_save_16bit_model",
)


def find(config: Mapping[str, Any], folder: Path) -> Iterator[Finding]:
    """Yield what is wrong with ``config``.

    Args:
        config: Accelerate's configuration.
        folder: where its ``deepspeed_config_file`` is looked for.
    """
    kind = str(config.get("distributed_type", "NO")).upper()
    if kind != "DEEPSPEED":
        yield error(
            TOPIC,
            f"'distributed_type' is {kind!r}: DeepSpeed is not used, and ZeroSyncPlugin does nothing",
            "Set 'distributed_type: DEEPSPEED' with a 'deepspeed_config'.",
        )
    block = dict(config.get("deepspeed_config") or {})
    inner = block.get("deepspeed_config_file")
    if config.get("mixed_precision") == "fp16" and config.get("use_cpu"):
        yield error(TOPIC, "'mixed_precision' is fp16 on CPU, which DeepSpeed does not train", "Use bf16 or no.")
    if config.get("use_cpu") and config.get("gpu_ids") != "":
        yield note(
            TOPIC, "'use_cpu' is set, but GPUs of this machine would be used all the same", "Set 'gpu_ids: \"\"', too."
        )
    if config.get("use_cpu") and int(config.get("num_processes") or 1) > 1:
        yield note(
            TOPIC,
            "'use_cpu' is set: Accelerate by itself makes the process group without a backend there, and every rank"
            " takes itself for the only one",
            "Train with ZeroSyncPlugin, or by python -m zerosync_strategy.accelerate.run, which name gloo.",
        )
    if inner is None:
        yield from _fields(block)
        return
    if both := [name for name in _IN_BOTH if name in block]:
        yield error(
            TOPIC,
            f"'deepspeed_config_file' is given beside {', '.join(both)}, and Accelerate refuses both",
            "Move them into the DeepSpeed configuration.",
        )
    try:
        text = str(inner)
        deepspeed = json.loads(text if text.lstrip().startswith("{") else (folder / text).read_text())
    except (OSError, ValueError) as problem:
        yield error(TOPIC, f"'deepspeed_config_file': {problem}", "Give a JSON file, or JSON itself.")
        return
    yield from deepspeed_traps.find(deepspeed, "Accelerate")


def _fields(block: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what is wrong where Accelerate makes DeepSpeed's configuration of its own fields."""
    zero = {"stage": int(block.get("zero_stage", 2))}
    yield from deepspeed_traps.find({"zero_optimization": zero, **_clipping(block)}, "Accelerate")


def _clipping(block: Mapping[str, Any]) -> dict[str, float]:
    value = block.get("gradient_clipping")
    return {} if value in (None, "auto", "none") else {"gradient_clipping": float(str(value))}
