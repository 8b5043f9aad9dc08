"""The files of DeepSpeed's checkpoints: those that a rank writes and reads, and what is missing of universal ones.

From a universal checkpoint, DeepSpeed restores what the optimizer trains and its state. It leaves the rest of the
module as the engine was built: buffers, and parameters that are not trained. Under ZeRO-3 it gives the options of the
first group of parameters to all groups, and one count of steps to all shards, which each of them advances.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.engine import zero, zero3
from zerosync_strategy.core.engine.interpose import replaced
from zerosync_strategy.core.engine.parameter import record_of

LATEST_UNIVERSAL = "latest_universal"


def writes_at_once(engine: Any) -> bool:
    """Return whether a file is on the disk when DeepSpeed's ``save`` of it returns, written by one rank.

    ``"checkpoint": {"writer": ...}`` and engines of others may write in the background, or with several ranks.
    """
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    return type(engine.checkpoint_engine) is TorchCheckpointEngine


@contextmanager
def writing(engine: Any, around: Callable[[str | None], AbstractContextManager[None]]) -> Iterator[None]:
    """While ``engine`` saves: write each file in ``around(path)``, and DeepSpeed's script in ``around(None)``."""
    writer = engine.checkpoint_engine
    save, copy_script = writer.save, engine._copy_recovery_script

    def save_around(state_dict: Any, path: str) -> None:
        with around(path):
            save(state_dict, path)

    def copy_script_around(save_path: str) -> None:
        with around(None):
            copy_script(save_path)

    with replaced(writer, "save", save_around), replaced(engine, "_copy_recovery_script", copy_script_around):
        yield


def files_to_load(engine: Any, directory: Path, tag: str, shards: bool, rank: int | None = None) -> list[Path]:
    """Return the first files that this rank, or ``rank``, reads of a checkpoint, ``shards``: the optimizer's, too."""
    if engine.mp_world_size > 1:  # which may be divided otherwise in the checkpoint
        return []
    names = [engine._get_ckpt_name(str(directory), tag)]
    if shards:
        names.append(engine._get_zero_ckpt_name(str(directory), tag))
    paths = [Path(name) for name in names]
    if rank is None:
        return paths
    own = dist.get_rank(zero.data_parallel_group(engine.optimizer))
    return [path.with_name(path.name.replace(f"pp_rank_{own}_", f"pp_rank_{rank}_")) for path in paths]


def frozen_missing(module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the frozen parameters of ``module`` that ``state`` lacks, as they are; under each of their names."""
    params = module.named_parameters(remove_duplicate=False)
    return {name: param.data for name, param in params if not param.requires_grad and name not in state}


def is_readable(engine: Any) -> bool:
    """Return whether other files than a rank's own can be read by it: no model-parallel ranks, and torch's format."""
    return bool(engine.mp_world_size == 1 and writes_at_once(engine))


def loads_universal(engine: Any) -> bool:
    """Return whether ``"checkpoint": {"load_universal": true}`` is in the configuration of ``engine``."""
    return bool(engine.load_universal_checkpoint())


def _untrained(module: torch.nn.Module, trained: Collection[Any]) -> Iterator[tuple[str, Any]]:
    ids = {id(param) for param in trained}
    return ((name, param) for name, param in module.named_parameters() if id(param) not in ids)


def not_restored(module: torch.nn.Module, trained: Collection[Any]) -> str:
    """Return the name of a parameter that :func:`restore_rest` could give no values; empty if there is none."""
    untrained = ((name, param) for name, param in _untrained(module, trained) if zero3.is_sharded(param))
    return next((name for name, param in untrained if param.ds_numel and not zero3.has_plain_shard(param)), "")


@torch.no_grad()
def restore_rest(engine: Any, trained: Collection[Any], model_file: str, strict: bool, optimizer_state: bool) -> None:
    """After DeepSpeed has loaded a universal checkpoint: restore what it has left out. Sends nothing.

    A ``RuntimeError`` where ``strict`` and the checkpoint lacks part of the module.

    Args:
        trained: the parameters of its optimizer, and of others over its module.
        model_file: the first file of the module's state, as ``load_checkpoint`` returned it.
        optimizer_state: the state of the optimizer was loaded, too.
    """
    file, module = Path(model_file), engine.module
    names = dict(module.named_parameters(remove_duplicate=False)).keys()
    saved = read(file)
    state: dict[str, Any] = saved["module"]
    if zero.stage(engine) == 3:  # where the module's state has parameters without elements
        state = {name: value for name, value in state.items() if name not in names}
        state |= _untrained_of_stage_3(file, saved)
        if optimizer_state:
            _separate_groups(zero.stepping_optimizer(engine), file.parent)
    untrained = dict(_untrained(module, trained))
    others = module.state_dict().keys() - names
    if strict and (missing := sorted((untrained.keys() | others) - state.keys())):
        raise RuntimeError(f"the universal checkpoint lacks {', '.join(map(repr, missing))} of the module")
    module.load_state_dict({name: state[name] for name in others & state.keys()}, strict=False)
    for name in untrained.keys() & state.keys():
        _set_values(untrained[name], state[name])


def _set_values(param: Any, full: torch.Tensor) -> None:
    if zero3.is_sharded(param):
        record_of(param).set_values(full.to(param.device, param.dtype))
    else:
        param.data.copy_(full)


def _untrained_of_stage_3(file: Path, first: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the parameters that are not trained, in full; each rank's file, the ``first`` of which is read, has a
    shard of them.
    """
    others = range(1, first["dp_world_size"])
    saved = [first, *(read(file.with_name(file.name.replace("pp_rank_0_", f"pp_rank_{rank}_"))) for rank in others)]
    full = {}
    for name, shape in (first["frozen_param_shapes"] or {}).items():
        flat = torch.cat([shards["frozen_param_fragments"][name].reshape(-1) for shards in saved])
        full[name] = flat[: shape.numel()].view(shape)
    return full


def _separate_groups(stepping: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Give each group of parameters its own options again, and each shard its own count of steps."""
    saved = read(checkpoint / "zero" / "optimizer_state.pt")["optimizer_state_dict"]["param_groups"]
    for group, options in zip(stepping.param_groups, saved, strict=True):
        group.update({name: value for name, value in options.items() if name != "params"})
    for state in stepping.state.values():
        if isinstance(step := state.get("step"), torch.Tensor):
            state["step"] = step.clone()


def read(file: Path) -> dict[str, Any]:
    """Return what ``file`` has; tensors on the host, read where they are asked for, but for torch's old format."""
    lazily = zipfile.is_zipfile(file)
    return torch.load(file, map_location="cpu", weights_only=False, mmap=lazily)
