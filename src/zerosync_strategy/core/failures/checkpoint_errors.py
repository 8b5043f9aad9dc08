"""Errors of checkpoints: what they say beside what was found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zerosync_strategy.core.failures.rank_status import RankError, is_communication_error

UNWRITABLE = "Is the disk full? Earlier checkpoints are as they were."
CONVERT = "DeepSpeed's ds_to_universal converts a checkpoint, to be loaded with 'checkpoint': {'load_universal': true}"
OTHER_SETUP = (
    "Was it written with another model, ZeRO stage, optimizer or number of ranks? For another number of ranks,"
    f" {CONVERT}"
)
"""Ends without a full stop."""
HALF_LOADED = (
    f"{OTHER_SETUP}. On every rank, parts of the module, the optimizer and the counters may be replaced and others not:"
    " load another checkpoint before you go on, or build the engine anew."
)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read, on any rank: all ranks get it. ``__cause__`` has this rank's error."""


@contextmanager
def as_checkpoint_errors(what: str, remedy: str) -> Iterator[None]:
    """Around what may fail on this rank alone, or on all alike: its errors name neither the path nor the cause.

    Raises:
        CheckpointError: for what is raised there, unless it says enough.
    """
    try:
        yield
    except (RankError, CheckpointError):
        raise
    except Exception as error:
        if is_communication_error(error):
            raise
        raise CheckpointError(
            f"Cannot {what}: {type(error).__name__}: {error}".rstrip(":. ") + f". {remedy}"
        ) from error
