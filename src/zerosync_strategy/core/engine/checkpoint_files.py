"""The files of DeepSpeed's checkpoints: who writes and reads them, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.engine import contract, deepspeed_internals
from zerosync_strategy.core.engine.interpose import Stock, replaced
from zerosync_strategy.core.engine.saved_files import files_of


def writes_at_once(engine: Any) -> bool:
    """Return whether a file is on disk when DeepSpeed's ``save`` of it returns, written by one rank.

    ``"checkpoint": {"writer": ...}`` and other checkpoint engines may write in the background, or with several ranks.
    """
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    return type(engine.checkpoint_engine) is TorchCheckpointEngine


@contextmanager
def writing(engine: Any, around: Callable[[str | None], AbstractContextManager[None]]) -> Iterator[None]:
    """While ``engine`` saves, write each file in ``around(path)``, and DeepSpeed's script in ``around(None)``."""
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


def files_to_load(engine: Any, folder: Path, shards: bool, any_ranks: bool) -> list[Path]:
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


def frozen_missing(module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the frozen parameters of ``module`` that ``state`` lacks, under each of their names."""
    params = module.named_parameters(remove_duplicate=False)
    return {name: param.data for name, param in params if not param.requires_grad and name not in state}


class FrozenStay(Stock):
    """Overrides of ``DeepSpeedEngine``: frozen parameters that a checkpoint lacks keep their values."""

    module: torch.nn.Module

    def load_module_state_dict(
        self, checkpoint: dict[str, Any], strict: bool = True, custom_load_fn: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        def load(src: dict[str, Any], dst: torch.nn.Module) -> None:
            custom_load_fn(src=src | frozen_missing(dst, src), dst=dst)

        if custom_load_fn is None:
            checkpoint["module"].update(frozen_missing(self.module, checkpoint["module"]))
        load_fn = None if custom_load_fn is None else load
        super().load_module_state_dict(checkpoint, strict, load_fn, *args, **kwargs)


def is_readable(engine: Any) -> bool:
    """Return whether a rank can read the files of others: no model parallelism, and torch's format."""
    return bool(engine.mp_world_size == 1 and writes_at_once(engine))


def loads_universal(engine: Any) -> bool:
    """Return whether ``"checkpoint": {"load_universal": true}`` is in the configuration of ``engine``."""
    return bool(engine.load_universal_checkpoint())


@contextmanager
def loading_without_optimizer(engine: Any) -> Iterator[None]:
    """Around ``load_checkpoint`` of an engine without an optimizer, which DeepSpeed 0.19.8 requires to have one."""
    contract.require(deepspeed_internals.EVALUATION)
    engine.optimizer._restore_from_bit16_weights = lambda: None
    try:
        yield
    finally:
        del engine.optimizer._restore_from_bit16_weights
