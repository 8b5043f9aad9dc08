"""What a given DeepSpeed configuration leaves open, ``"auto"`` or left out, and the framework or DeepSpeed decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

AUTO = "auto"
_PRECISIONS = {"fp16": ("16-mixed", "16-true"), "bf16": ("bf16-mixed", "bf16-true")}
_MADE_BY_PROGRAMS = ("optimizer", "scheduler")


def fill_in(config: dict[str, Any], stage: int) -> None:
    """Give ``config`` the ZeRO ``stage`` where it has none, and remove each ``"auto"`` that has a default.

    Those in the optimizer and the scheduler have none and stay: see :func:`undecided`.
    """
    zero = config.setdefault("zero_optimization", {})
    if zero.get("stage", AUTO) == AUTO:
        zero["stage"] = stage
    # DeepSpeed tests few optimizers. ZeroSync refuses those that are wrong on its shards.
    config.setdefault("zero_allow_untested_optimizer", True)
    for path in list(_autos(config)):
        *blocks, name = path
        if path[0] in _MADE_BY_PROGRAMS:
            continue
        if name == "enabled" and blocks and blocks[0] in _PRECISIONS:
            continue  # once the precision is known
        block = config
        for key in blocks:
            block = block[key]
        del block[name]


def undecided(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the path of an ``"auto"`` in the optimizer or scheduler, for which nobody has a value; empty if none."""
    return next((path for path in _autos(config) if path[0] in _MADE_BY_PROGRAMS), ())


def fill_in_precision(config: dict[str, Any], precision: str) -> None:
    """Enable the dtypes that ``config`` leaves to ``"auto"`` as the framework's ``precision`` says."""
    for dtype, precisions in _PRECISIONS.items():
        if config.get(dtype, {}).get("enabled") == AUTO:
            config[dtype]["enabled"] = precision in precisions


def _autos(config: dict[str, Any], *path: str) -> Iterator[tuple[str, ...]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _autos(value, *path, name)
        elif value == AUTO:
            yield (*path, name)
