"""What a checkpoint has of an engine beside parameters and the optimizer: counters, scheduler, random numbers."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from zerosync_strategy.core.engine import zero

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SCALES = ("dynamic_loss_scale", "overflow")


def state(engine: Any) -> dict[str, Any]:
    """Return the state of ``engine`` for a checkpoint."""
    optimizer, scheduler = engine.optimizer, engine.lr_scheduler
    scaler = optimizer.torch_autocast_gradscaler
    return {
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
        "loss_scaler": {**vars(optimizer.loss_scaler)},
        "loss_scale": {name: getattr(optimizer, name) for name in _SCALES},
        "gradient_scaler": None if scaler is None else scaler.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
    }


def load(engine: Any, saved: dict[str, Any], scheduler: bool, loss_scale: bool) -> None:
    """Restore what :func:`state` has returned: counters, and as asked, learning-rate scheduler and loss scale."""
    for name, value in saved["counters"].items():
        setattr(engine, name, value)
    if loss_scale:
        _load_scale(engine.optimizer, saved)
    if scheduler and engine.lr_scheduler is not None and saved["scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(copy.deepcopy(saved["scheduler"]))


def _load_scale(optimizer: Any, saved: dict[str, Any]) -> None:
    # A run in another precision has another kind of scaler, and keeps its own.
    if vars(optimizer.loss_scaler).keys() == saved["loss_scaler"].keys():
        vars(optimizer.loss_scaler).update(saved["loss_scaler"])
        for name, value in saved["loss_scale"].items():
            setattr(optimizer, name, value)
    if optimizer.torch_autocast_gradscaler is not None and saved["gradient_scaler"] is not None:
        optimizer.torch_autocast_gradscaler.load_state_dict(saved["gradient_scaler"])


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of this rank's random number generators."""
    state = {"torch": torch.get_rng_state(), "numpy": numpy.random.get_state(), "python": random.getstate()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore what :func:`random_state` has returned."""
    torch.set_rng_state(state["torch"])
    numpy.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def why_not_distributed(engine: Any) -> str:
    """Return what of the configuration of ``engine`` a distributed checkpoint cannot hold; empty if it can all."""
    configured = zero.user_config(engine)
    of_zero = configured.get("zero_optimization", {})
    if of_zero.get("zero_hpz_partition_size", 1) > 1:
        return "'zero_optimization.zero_hpz_partition_size' (a second copy of shards)"
    if any((of_zero.get(f"offload_{what}") or {}).get("device") == "nvme" for what in ("optimizer", "param")):
        return "offloading to NVMe (values are on disk)"
    if any(of_zero.get(f"zero_quantized{what}") for what in ("_weights", "_nontrainable_weights")):
        return "quantized weights"
    if configured.get("data_efficiency", {}).get("enabled"):
        return "'data_efficiency' (its samplers have states of their own)"
    if configured.get("checkpoint", {}).get("use_node_local_storage"):
        return "'checkpoint.use_node_local_storage' (all ranks must write to one file system)"
    return ""
