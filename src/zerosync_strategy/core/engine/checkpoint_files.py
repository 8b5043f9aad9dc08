"""The files of DeepSpeed's checkpoints: those that a rank writes, and those that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any


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

    writer.save, engine._copy_recovery_script = save_around, copy_script_around
    try:
        yield
    finally:
        del writer.save, engine._copy_recovery_script


def files_to_load(engine: Any, directory: Path, tag: str, shards: bool) -> list[Path]:
    """Return the first files that this rank reads of a checkpoint; ``shards``: its shard of the optimizer, too."""
    if engine.mp_world_size > 1:  # which may be divided otherwise in the checkpoint
        return []
    names = [engine._get_ckpt_name(str(directory), tag)]
    if shards:
        names.append(engine._get_zero_ckpt_name(str(directory), tag))
    return [Path(name) for name in names]
