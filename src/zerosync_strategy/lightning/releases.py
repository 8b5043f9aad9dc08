"""What not every supported release of Lightning has."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import callbacks

WEIGHT_AVERAGING: tuple[type[Any], ...] = (callbacks.WeightAveraging,) if hasattr(callbacks, "WeightAveraging") else ()
"""The callback that averages weights, in releases that have one."""
