"""DeepSpeed's hooks on the modules of ZeRO-3, made anew for units: modules that are gathered with all below them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zerosync_strategy.core.engine.compilation import modules_running, remove_module_hooks
from zerosync_strategy.core.engine.interpose import replaced


def is_unit(module: torch.nn.Module) -> bool:
    """Return whether ``module`` is gathered as a whole: by DeepSpeed's own word, a leaf."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import z3_leaf_module

    return bool(z3_leaf_module(module))


def max_unit_numel(engine: Any) -> int:
    """Return how many elements a unit may have, so that one that runs and the next are within DeepSpeed's limit."""
    return int(engine._config.zero_config.max_live_parameters) // 2


def gather_as_wholes(engine: Any, modules: Iterable[torch.nn.Module], flag: bool = True) -> None:
    """Let DeepSpeed's hooks gather each of ``modules`` as a whole, or with ``flag=False`` no longer."""
    from deepspeed.utils import set_z3_leaf_module

    for module in modules:
        set_z3_leaf_module(module, flag)
        for param in [] if flag else module.parameters():
            vars(param).pop("ds_z3_leaf_module", None)
    offload = engine.optimizer.parameter_offload
    remove_module_hooks(offload)
    with replaced(offload, "module", engine.module):  # of several engines over one module, it has a part
        offload.setup_zero_stage3_hooks()
    modules_running().pop()  # the model, which is there already
