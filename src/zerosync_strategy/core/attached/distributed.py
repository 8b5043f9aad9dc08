"""Saving distributed checkpoints of an attached engine, at once or in the background (K3), and loading any by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zerosync_strategy.core.attached.checkpointing import (
    before_save,
    checkpointing,
    of_every_format,
    take_last,
)
from zerosync_strategy.core.attached.contents import AnyReader, Contents, client_state
from zerosync_strategy.core.attached.engine import AttachedEngine
from zerosync_strategy.core.checkpoints.background import bytes_of
from zerosync_strategy.core.checkpoints.saves import DistributedSave, engine_save
from zerosync_strategy.core.failures.agreement import together
from zerosync_strategy.core.failures.errors import HALF_READ, NOTHING_LOADED


def save(
    attached: AttachedEngine, path: Any, tag: str, said: dict[str, Any], save_latest: bool, exclude_frozen: bool
) -> bool:
    """Save the engine, as ``save_checkpoint`` does, with what the program has ``said`` as client state. Collective.

    Every rank raises if one cannot write.
    """
    config, step = attached.parts.config, attached.parts.engine.global_steps
    before_save(attached)
    part = DistributedSave(Path(path), tag, step, save_latest, config.checkpoint_background)
    with checkpointing(attached, part.what, stock=False), engine_save(part, verifiable=True), part.writing():
        part.content = Contents(attached).written(said | of_every_format(attached), exclude_frozen)
        if part.in_background:
            part.content = attached.parts.copies.of(part.content)
    return True


def bytes_to_copy(attached: AttachedEngine) -> int:
    """Return the host memory that saves in the background take on this rank; 0 if they are written at once. Collective.

    States of the optimizer count once it has made them.
    """
    if not attached.parts.config.checkpoint_background:
        return 0
    with checkpointing(attached, "measure a checkpoint", stock=False):
        return bytes_of(Contents(attached).written({}, exclude_frozen=False))


def load(
    attached: AttachedEngine, path: Any, tag: str, open_reader: type[AnyReader], strict: bool, states: bool,
    scheduler: bool, module_only: bool,
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """Load the verified ``tag`` by name; return its directory and the client state. Collective.

    Every rank raises if one cannot read, or if the checkpoint is of another model or optimizer.
    """
    folder, what = Path(path) / tag, f"read the checkpoint in {path}"
    attached.parts.window.abort("load_checkpoint() was called")
    with checkpointing(attached, what, stock=False):
        contents = Contents(attached)

        def examine() -> tuple[str, AnyReader]:
            reader = open_reader(folder)
            contents.examine(reader, strict, states)
            return "", reader

        reader = together(what, examine, lambda: NOTHING_LOADED)

        def read() -> tuple[str, dict[str, Any]]:
            contents.read(reader, states)
            if not module_only:
                contents.read_engine(reader, states, scheduler)
            return "", client_state(reader)

        try:
            said = together(what, read, lambda: HALF_READ)
            contents.give()
        finally:
            attached.states_loaded()
    take_last(attached, said)
    return str(folder), said
