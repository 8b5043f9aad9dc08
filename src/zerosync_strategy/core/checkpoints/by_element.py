"""An optimizer that steps flat shards loads states by element, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zerosync_strategy.core.checkpoints.manifests import DamageError
from zerosync_strategy.core.engine import checkpoint_files, zero
from zerosync_strategy.core.failures.agreement import together
from zerosync_strategy.core.failures.errors import NOTHING_LOADED


def refuse_states_by_name(engine: Any, directory: Path, tag: str) -> None:
    """Raise where the verified checkpoint, of as many ranks, has states of whole parameters. Collective.

    A ``CheckpointError`` on every rank.
    """
    if checkpoint_files.loads_universal(engine) or not checkpoint_files.is_readable(engine):
        return

    def look() -> tuple[str, None]:
        own = checkpoint_files.files_to_load(engine, directory, tag, shards=True)[-1]
        if checkpoint_files.is_by_name(checkpoint_files.read(own)["optimizer_state_dict"]):
            raise DamageError(
                "it has states of an optimizer that steps whole parameters, and"
                f" {type(zero.stepping_optimizer(engine)).__name__} steps flat shards. Load it with the optimizer and"
                " the option elementwise_optimizer with which it was saved, or its weights alone, with"
                " load_optimizer_states=False"
            )
        return "", None

    together(f"read the checkpoint in {directory}", look, lambda: NOTHING_LOADED)
