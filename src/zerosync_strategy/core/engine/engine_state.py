"""The state of an engine: what of it is in memory and in checkpoints, and the files in which DeepSpeed saves it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from zerosync_strategy.core.engine import contract, deepspeed_internals, zero, zero3, zero3_optimizer
from zerosync_strategy.core.engine.patches import Stock, replaced
from zerosync_strategy.core.engine.saved_files import files_of
from zerosync_strategy.core.engine.types import DeepSpeedEngine, ZeroOptimizer

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SCALES = ("dynamic_loss_scale", "overflow")


def resident(engine: DeepSpeedEngine) -> Mapping[str, list[torch.Tensor]]:
    """Return the tensors that an engine keeps between optimizer steps, by kind.

    ``"optimizer"``: master weights and optimizer states. ``"parameters"``: the module's parameters, sharded or full,
    and its buffers. ``"gradients"``: the shards in which ZeRO-3 keeps gradients. In fp32, master weights may be
    parameters, too.
    """
    module, optimizer = engine.module, engine.optimizer
    if zero.stage(engine) == 3:
        own = [param.ds_tensor for param in module.parameters() if zero3.is_sharded(param)]
        masters = optimizer.fp32_partitioned_groups_flat
        gradients = list(zero3_optimizer.gradient_shards(optimizer).values())
    else:
        own, masters, gradients = [], optimizer.single_partition_of_fp32_groups, []
    stepping = zero.stepping_optimizer(engine)
    states = (value for state in stepping.state.values() if isinstance(state, Mapping) for value in state.values())
    stepped = (param.data for group in stepping.param_groups for param in group["params"])  # whole ones on ZeRO-3 (R6)
    return {
        "optimizer": [*(master.data for master in masters), *stepped, *filter(torch.is_tensor, states)],
        "parameters": [*(param.data for param in module.parameters()), *module.buffers(), *own],
        "gradients": gradients,
    }


def state(engine: DeepSpeedEngine) -> dict[str, Any]:
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


def load(engine: DeepSpeedEngine, saved: dict[str, Any], scheduler: bool, loss_scale: bool) -> None:
    """Restore what :func:`state` has returned: counters, and as asked, learning-rate scheduler and loss scale."""
    for name, value in saved["counters"].items():
        setattr(engine, name, value)
    if loss_scale:
        _load_scale(engine.optimizer, saved)
    if scheduler and engine.lr_scheduler is not None and saved["scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(copy.deepcopy(saved["scheduler"]))


def _load_scale(optimizer: ZeroOptimizer, saved: dict[str, Any]) -> None:
    # A run in another precision has another kind of scaler, and keeps its own.
    if vars(optimizer.loss_scaler).keys() == saved["loss_scaler"].keys():
        vars(optimizer.loss_scaler).update(saved["loss_scaler"])
        for name, value in saved["loss_scale"].items():
            setattr(optimizer, name, value)
    if optimizer.torch_autocast_gradscaler is not None and saved["gradient_scaler"] is not None:
        optimizer.torch_autocast_gradscaler.load_state_dict(saved["gradient_scaler"])


def random_state(device: torch.device) -> dict[str, object]:
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


def why_not_distributed(engine: DeepSpeedEngine) -> str:
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


# ---- DeepSpeed's files: who writes and reads them, and when ----------------------------------------------------------


def writes_at_once(engine: DeepSpeedEngine) -> bool:
    """Return whether a file is on disk when DeepSpeed's ``save`` of it returns, written by one rank.

    ``"checkpoint": {"writer": ...}`` and other checkpoint engines may write in the background, or with several ranks.
    """
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    return type(engine.checkpoint_engine) is TorchCheckpointEngine


@contextmanager
def writing(engine: DeepSpeedEngine, around: Callable[[str | None], AbstractContextManager[None]]) -> Iterator[None]:
    """While ``engine`` saves, write each file in ``around(path)``, and DeepSpeed's script in ``around(None)``."""
    writer = engine.checkpoint_engine
    save, copy_script = writer.save, engine._copy_recovery_script

    def save_around(state_dict: object, path: str) -> None:
        with around(path):
            save(state_dict, path)

    def copy_script_around(save_path: str) -> None:
        with around(None):
            copy_script(save_path)

    with replaced(writer, "save", save_around), replaced(engine, "_copy_recovery_script", copy_script_around):
        yield


def files_to_load(engine: DeepSpeedEngine, folder: Path, shards: bool, any_ranks: bool) -> list[Path]:
    """Return the first files that this rank loads from ``folder``; with ``shards``, those of the optimizer, too.

    ``any_ranks``: if others have written it, return those of one of them.
    """
    if engine.mp_world_size > 1:  # the checkpoint may have another number of them
        return []
    parent, tag = str(folder.parent), folder.name
    names = [engine._get_ckpt_name(parent, tag)]
    if shards:
        names.append(engine._get_zero_ckpt_name(parent, tag))
    own = [Path(name) for name in names]
    if any_ranks and not all(path.is_file() for path in own):
        return files_of(folder, dist.get_rank())[: len(own)] or own
    return own


def frozen_missing(module: torch.nn.Module, state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return the frozen parameters of ``module`` that ``state`` lacks, under each of their names."""
    params = module.named_parameters(remove_duplicate=False)
    return {name: param.data for name, param in params if not param.requires_grad and name not in state}


class FrozenStay(Stock):
    """Overrides of ``DeepSpeedEngine``: frozen parameters that a checkpoint lacks keep their values."""

    module: torch.nn.Module

    def load_module_state_dict(
        self, checkpoint: dict[str, Any], strict: bool = True, custom_load_fn: Any = None,
        *args: object, **kwargs: object,
    ) -> None:  # fmt: skip
        def load(src: dict[str, Any], dst: torch.nn.Module) -> None:
            custom_load_fn(src=src | frozen_missing(dst, src), dst=dst)

        if custom_load_fn is None:
            checkpoint["module"].update(frozen_missing(self.module, checkpoint["module"]))
        load_fn = None if custom_load_fn is None else load
        super().load_module_state_dict(checkpoint, strict, load_fn, *args, **kwargs)


def is_readable(engine: DeepSpeedEngine) -> bool:
    """Return whether a rank can read the files of others: no model parallelism, and torch's format."""
    return bool(engine.mp_world_size == 1 and writes_at_once(engine))


def loads_universal(engine: DeepSpeedEngine) -> bool:
    """Return whether ``"checkpoint": {"load_universal": true}`` is in the configuration of ``engine``."""
    return bool(engine.load_universal_checkpoint())


@contextmanager
def loading_without_optimizer(engine: DeepSpeedEngine) -> Iterator[None]:
    """Around ``load_checkpoint`` of an engine without an optimizer, which DeepSpeed 0.19.8 requires to have one."""
    contract.require(deepspeed_internals.EVALUATION)
    engine.optimizer._restore_from_bit16_weights = lambda: None
    try:
        yield
    finally:
        del engine.optimizer._restore_from_bit16_weights
