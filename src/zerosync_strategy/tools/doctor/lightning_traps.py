"""Traps in a configuration of LightningCLI."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerosync_strategy.tools.doctor import deepspeed_traps
from zerosync_strategy.tools.doctor.findings import Finding, error, note, warning

TOPIC = "configuration"


def find(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what is wrong with ``config``, a Trainer's arguments under ``trainer`` or by themselves."""
    trainer = config.get("trainer") or config
    strategy = trainer.get("strategy")
    name, options = _named(strategy)
    if "zerosync" not in name.lower():
        yield (error if "deepspeed" in name.lower() else warning)(
            TOPIC,
            f"'strategy' is {name or 'left out'}: "
            + (
                "Lightning's own, whose manual optimization and clipping are silently wrong (docs/results.md)"
                if "deepspeed" in name.lower()
                else "ZeroSync is not used"
            ),
            "Use zerosync_stage_2, zerosync_stage_3, or class_path: zerosync_strategy.ZeroSyncStrategy.",
        )
    if trainer.get("gradient_clip_algorithm") == "value":
        yield error(
            TOPIC,
            "'gradient_clip_algorithm' is 'value', which ZeroSync refuses under Lightning",
            "Clip by norm, or by value in a hook on the gradients.",
        )
    precision = str(trainer.get("precision", ""))
    if precision in ("16-mixed", "16-true", "16") and trainer.get("accelerator") == "cpu":
        yield error(TOPIC, f"'precision' is {precision!r} on CPU, which DeepSpeed does not train", "Use bf16-mixed.")
    given = options.get("config")
    if isinstance(given, (str, Path)):
        yield note(
            TOPIC, f"DeepSpeed's configuration is in {given}, which was not read", f"Give --config {given}, too."
        )
    elif isinstance(given, Mapping):
        yield from deepspeed_traps.find(given, "Lightning")


def _named(strategy: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name or class path of a strategy, and the arguments beside it."""
    if isinstance(strategy, Mapping):
        return str(strategy.get("class_path", "")), strategy.get("init_args") or {}
    return str(strategy or ""), {}
