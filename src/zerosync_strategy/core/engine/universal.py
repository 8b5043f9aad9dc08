"""Universal checkpoints, by which a run goes on with another number of ranks: what DeepSpeed's own loading leaves out.

DeepSpeed restores from them what the optimizer trains and its state. It leaves the rest of the module as the engine was
built: buffers, and parameters that are not trained. Under ZeRO-3 it gives the options of the first group of parameters
(learning rate, weight decay) to all groups, and one count of steps to all shards, which each of them advances.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from zerosync_strategy.core.engine import contract, zero, zero3

LATEST = "latest_universal"


def loads_universal(engine: Any) -> bool:
    """Return whether ``"checkpoint": {"load_universal": true}`` is in the configuration of ``engine``."""
    return bool(engine.load_universal_checkpoint())


@torch.no_grad()
def restore_rest(engine: Any, trained: Collection[Any], model_file: str, strict: bool, optimizer_state: bool) -> None:
    """After DeepSpeed has loaded a universal checkpoint: restore what it has left out. Sends nothing.

    Args:
        engine: into which it was loaded.
        trained: the parameters of its optimizer, and of others over its module.
        model_file: the first file of the module's state, as ``load_checkpoint`` returned it.
        strict: raise where the checkpoint lacks part of the module.
        optimizer_state: the state of the optimizer was loaded, too.

    Raises:
        RuntimeError: the checkpoint lacks part of the module.
    """
    contract.require(contract.UNIVERSAL, engine)
    file, module = Path(model_file), engine.module
    names = dict(module.named_parameters(remove_duplicate=False)).keys()
    state: dict[str, Any] = _read(file)["module"]
    if zero.stage(engine) == 3:  # where the module's state has parameters without elements
        state = {name: value for name, value in state.items() if name not in names}
        state |= _untrained_of_stage_3(file, engine.loaded_checkpoint_dp_world_size)
        if optimizer_state:
            _separate_groups(zero.stepping_optimizer(engine), file.parent)
    ids = {id(param) for param in trained}
    untrained = {name: param for name, param in module.named_parameters() if id(param) not in ids}
    others = module.state_dict().keys() - names
    if strict and (missing := sorted((untrained.keys() | others) - state.keys())):
        raise RuntimeError(f"the universal checkpoint lacks {', '.join(map(repr, missing))} of the module")
    module.load_state_dict({name: state[name] for name in others & state.keys()}, strict=False)
    for name in untrained.keys() & state.keys():
        zero3.set_values(untrained[name], state[name])


def _untrained_of_stage_3(first: Path, ranks: int) -> dict[str, torch.Tensor]:
    """Return the parameters that are not trained, in full; each of ``ranks`` files has a shard of them."""
    saved = [_read(first.with_name(first.name.replace("pp_rank_0_", f"pp_rank_{rank}_"))) for rank in range(ranks)]
    full = {}
    for name, shape in (saved[0]["frozen_param_shapes"] or {}).items():
        flat = torch.cat([shards["frozen_param_fragments"][name].reshape(-1) for shards in saved])
        full[name] = flat[: shape.numel()].view(shape)
    return full


def _separate_groups(stepping: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Give each group of parameters its own options again, and each shard its own count of steps."""
    saved = _read(checkpoint / "zero" / "optimizer_state.pt")["optimizer_state_dict"]["param_groups"]
    for group, options in zip(stepping.param_groups, saved, strict=True):
        group.update({name: value for name, value in options.items() if name != "params"})
    for state in stepping.state.values():
        if isinstance(step := state.get("step"), torch.Tensor):
            state["step"] = step.clone()


def _read(file: Path) -> dict[str, Any]:
    saved: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False, mmap=True)
    return saved
