"""What a given DeepSpeed configuration leaves open, ``"auto"`` or left out, and Lightning or DeepSpeed decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

AUTO = "auto"
_PRECISIONS = {"fp16": ("16-mixed", "16-true"), "bf16": ("bf16-mixed", "bf16-true")}


def fill_in(config: dict[str, Any], stage: int) -> None:
    """Give ``config`` the ZeRO ``stage`` where it has none, and remove each ``"auto"`` that has a default.

    Raises:
        MisconfigurationException: an ``"auto"`` in the optimizer or scheduler, which Lightning has no value for.
    """
    zero = config.setdefault("zero_optimization", {})
    if zero.get("stage", AUTO) == AUTO:
        zero["stage"] = stage
    # DeepSpeed tests few optimizers. ZeroSync refuses those that are wrong on its shards.
    config.setdefault("zero_allow_untested_optimizer", True)
    for path in list(_autos(config)):
        *blocks, name = path
        if blocks[:1] in (["optimizer"], ["scheduler"]):
            raise MisconfigurationException(
                f"ZeroSyncStrategy got {'.'.join(path)!r} = 'auto' in the DeepSpeed configuration, and Lightning has no"
                f" value for it. Set it, or leave {path[0]!r} out and return one from configure_optimizers()."
            )
        if name == "enabled" and blocks and blocks[0] in _PRECISIONS:
            continue  # once the precision is known
        block = config
        for key in blocks:
            block = block[key]
        del block[name]


def fill_in_precision(config: dict[str, Any], precision: str) -> None:
    """Enable the dtypes that ``config`` leaves to ``"auto"`` as the Trainer's ``precision`` says."""
    for dtype, precisions in _PRECISIONS.items():
        if config.get(dtype, {}).get("enabled") == AUTO:
            config[dtype]["enabled"] = precision in precisions


def _autos(config: dict[str, Any], *path: str) -> Iterator[tuple[str, ...]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _autos(value, *path, name)
        elif value == AUTO:
            yield (*path, name)
