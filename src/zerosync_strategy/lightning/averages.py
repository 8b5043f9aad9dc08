"""Checkpoints of a run with ``WeightAveraging``: Lightning saves the average in place of the module's state.

DeepSpeed saves the module and its optimizer, sharded. The average is in one more file of the same directory. It is a
checkpoint of Lightning's own, which ``load_from_checkpoint`` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from .library import WEIGHT_AVERAGING, LightningModule, Trainer

FILE = "averaged.ckpt"
"""Its name within the directory of a checkpoint."""

_OF_TRAINING = frozenset({"callbacks", "current_model_state", "loops", "lr_schedulers", "optimizer_states"})


def divide(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Divide Lightning's checkpoint into DeepSpeed's part, and the content of the average's file, if any."""
    if "averaging_state" not in checkpoint:
        return dict(checkpoint), None
    rest = {key: value for key, value in checkpoint.items() if key not in ("averaging_state", "current_model_state")}
    return rest, {key: value for key, value in checkpoint.items() if key not in _OF_TRAINING}


def save(averaged: dict[str, Any] | None, directory: str | Path) -> None:
    """Write the average's file; if there is no average, remove the file of an earlier run."""
    path = Path(directory) / FILE
    if averaged is not None:
        torch.save(averaged, path)
        return
    with suppress(FileNotFoundError):
        path.unlink()


def load(directory: str | Path) -> dict[str, Any]:
    """Return the entries of Lightning's checkpoint from the average's file; empty without a file."""
    path = Path(directory) / FILE
    if not path.is_file():
        return {}
    saved = torch.load(path, map_location="cpu", weights_only=False)
    return {key: saved[key] for key in ("state_dict", "averaging_state")}


def is_wanted(trainer: Trainer) -> bool:
    """Return whether to set the module to a checkpoint's average, as no callback takes the average instead."""
    averaging = [each for each in trainer.callbacks if isinstance(each, WEIGHT_AVERAGING)]  # type: ignore[attr-defined]
    return all(each._average_model is None for each in averaging)


def give(module: LightningModule, state: Mapping[str, object], strict: bool) -> None:
    """Set ``module`` to the average, on any stage. Collective."""
    from deepspeed import zero

    with zero.GatheredParameters(list(module.parameters()), modifier_rank=0):
        module.load_state_dict(state, strict=strict)
