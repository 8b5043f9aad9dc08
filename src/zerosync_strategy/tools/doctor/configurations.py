"""A configuration file of DeepSpeed, of ``accelerate launch`` or of LightningCLI, and the traps in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerosync_strategy.tools.doctor import deepspeed
from zerosync_strategy.tools.doctor.deepspeed import TOPIC
from zerosync_strategy.tools.doctor.findings import Finding

_IN_BOTH = (
    "gradient_clipping", "zero_stage", "offload_optimizer_device", "offload_param_device", "zero3_save_16bit_model",
)  # fmt: skip


def check(path: Path) -> list[Finding]:
    """Look for traps in a configuration file of DeepSpeed (JSON), Accelerate or LightningCLI (YAML), by its keys."""
    try:
        config = read(path)
    except (OSError, ValueError) as problem:
        return [TOPIC.error(f"{path}: {problem}", "Give a JSON or YAML file with a mapping.")]
    if "trainer" in config or "strategy" in config:
        kind, found = "Lightning", lightning(config)
    elif "distributed_type" in config or "deepspeed_config" in config:
        kind, found = "Accelerate", accelerate(config, path.parent)
    else:
        kind, found = "DeepSpeed", deepspeed.find(config)
    return TOPIC.or_ok(found, f"{path.name}, read as a configuration of {kind}, has no known trap")


def read(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML file.

    Raises:
        OSError: it cannot be read.
        ValueError: it has something else, or YAML is not installed.
    """
    text = path.read_text()
    try:
        config = json.loads(text)
    except ValueError as problem:
        if path.suffix == ".json":
            raise ValueError(f"no JSON: {problem}") from None
        config = _yaml(text)
    if not isinstance(config, Mapping):
        raise ValueError(f"found {type(config).__name__}, expected a mapping")
    return dict(config)


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ValueError("YAML needs PyYAML: pip install 'zerosync-strategy[cli]'") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise ValueError(f"neither JSON nor YAML: {problem}") from None


def accelerate(config: Mapping[str, Any], folder: Path) -> Iterator[Finding]:
    """Yield what is wrong with Accelerate's ``config``, whose ``deepspeed_config_file`` is looked for in ``folder``."""
    kind = str(config.get("distributed_type", "NO")).upper()
    if kind != "DEEPSPEED":
        found = f"'distributed_type' is {kind!r}: DeepSpeed is not used, and ZeroSyncPlugin does nothing"
        yield TOPIC.error(found, "Set 'distributed_type: DEEPSPEED' with a 'deepspeed_config'.")
    block = dict(config.get("deepspeed_config") or {})
    inner = block.get("deepspeed_config_file")
    use_cpu = config.get("use_cpu")
    if config.get("mixed_precision") == "fp16" and use_cpu:
        yield TOPIC.error("'mixed_precision' is fp16 on CPU, which DeepSpeed does not train", "Use bf16 or no.")
    if use_cpu and config.get("gpu_ids") != "":
        found = "'use_cpu' is set, but GPUs of this machine would be used all the same"
        yield TOPIC.note(found, "Set 'gpu_ids: \"\"', too.")
    if use_cpu and int(config.get("num_processes") or 1) > 1:
        yield TOPIC.note(
            "'use_cpu' is set: Accelerate by itself makes the process group without a backend there, and every rank"
            " takes itself for the only one",
            "Train with ZeroSyncPlugin, or by python -m zerosync_strategy.accelerate.run, which name gloo.",
        )
    if inner is None:  # Accelerate makes DeepSpeed's configuration of its own fields
        clipping = block.get("gradient_clipping")
        made = {} if clipping in (None, "auto", "none") else {"gradient_clipping": float(str(clipping))}
        zero = {"stage": int(block.get("zero_stage", 2))}
        yield from deepspeed.find({"zero_optimization": zero, **made}, "Accelerate")
        return
    if both := [name for name in _IN_BOTH if name in block]:
        found = f"'deepspeed_config_file' is given beside {', '.join(both)}, and Accelerate refuses both"
        yield TOPIC.error(found, "Move them into the DeepSpeed configuration.")
    try:
        text = str(inner)
        given = json.loads(text if text.lstrip().startswith("{") else (folder / text).read_text())
    except (OSError, ValueError) as problem:
        yield TOPIC.error(f"'deepspeed_config_file': {problem}", "Give a JSON file, or JSON itself.")
    else:
        yield from deepspeed.find(given, "Accelerate")


def lightning(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what is wrong with LightningCLI's ``config``, a Trainer's arguments under ``trainer`` or by themselves."""
    trainer = config.get("trainer") or config
    strategy = trainer.get("strategy") or ""
    if isinstance(strategy, Mapping):
        name, options = str(strategy.get("class_path", "")), strategy.get("init_args") or {}
    else:
        name, options = str(strategy), {}
    if "zerosync" not in name.lower():
        own = "Lightning's own, whose manual optimization and clipping are silently wrong (docs/results.md)"
        is_own = "deepspeed" in name.lower()
        yield (TOPIC.error if is_own else TOPIC.warning)(
            f"'strategy' is {name or 'left out'}: {own if is_own else 'ZeroSync is not used'}",
            "Use zerosync_stage_2, zerosync_stage_3, or class_path: zerosync_strategy.ZeroSyncStrategy.",
        )
    if trainer.get("gradient_clip_algorithm") == "value":
        found = "'gradient_clip_algorithm' is 'value', which ZeroSync refuses under Lightning"
        yield TOPIC.error(found, "Clip by norm, or by value in a hook on the gradients.")
    precision = str(trainer.get("precision", ""))
    if precision in ("16-mixed", "16-true", "16") and trainer.get("accelerator") == "cpu":
        yield TOPIC.error(f"'precision' is {precision!r} on CPU, which DeepSpeed does not train", "Use bf16-mixed.")
    given = options.get("config")
    if isinstance(given, (str, Path)):
        found = f"DeepSpeed's configuration is in {given}, which was not read"
        yield TOPIC.note(found, f"Give --config {given}, too.")
    elif isinstance(given, Mapping):
        yield from deepspeed.find(given, "Lightning")
