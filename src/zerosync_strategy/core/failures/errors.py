"""The errors for missing ranks and bad checkpoints, sentences that they share, and tests for communication errors."""

from __future__ import annotations

import re

import torch.distributed as dist

UNWRITABLE = "Is the disk full? Can all that is saved be pickled? Earlier checkpoints are as they were."
AS_MANY = "Load it on as many ranks and the same ZeRO stage, or its weights alone (load_optimizer_states=False)"
"""The remedy if only as many ranks can read a checkpoint. This and the next end without a full stop."""
OTHER_SETUP = "Was it written with another model or optimizer?"
HANDLE = (
    "zerosync is what attach() returned: engine.zerosync of the DeepSpeed engine; in Lightning,"
    " trainer.strategy.zerosync; in Fabric, fabric.strategy.zerosync; under Accelerate,"
    " accelerator.deepspeed_engine_wrapped.zerosync"
)
"""What ``zerosync`` means in the code examples of errors. Ends without a full stop."""
NOTHING_LOADED = "Nothing was loaded: every rank has what it had."
HALF_READ = (
    "On every rank, parts of the module, the optimizer and the counters may be replaced and others not: load another"
    " checkpoint before you go on, or build the engine anew."
)
HALF_LOADED = f"{OTHER_SETUP} {HALF_READ}"


def frozen_left_out(name: str) -> str:
    """Return the text for a checkpoint that lacks nothing but frozen parameters, such as ``name``."""
    return (
        f"it has no frozen parameters, such as {name!r}, as if saved with exclude_frozen_parameters=True. Give the"
        " strategy this option where you load, too, or load what is there with strict_loading = False in the"
        " LightningModule, strict=False in Fabric, load_module_strict=False in DeepSpeed and Accelerate"
    )


# gloo raises plain RuntimeErrors. They begin with a place in its source, except for closed connections.
_OF_GLOO = re.compile(
    r"\[(?:enforce fail at )?\S*\bgloo/\S+\.(?:cc|h):\d+\]"
    r"|Application timeout caused pair closure|Connection closed by peer \["
    r"|Gloo connectFullMesh failed with|failed to pass monitoredBarrier in"
)


class RankError(RuntimeError):
    """Communication with other ranks failed or timed out; the message says what each rank was doing."""


class CheckpointError(RuntimeError):
    """A rank could not write or read a checkpoint; raised on all ranks. ``__cause__`` is this rank's own error."""


class NothingReplaced(ValueError):
    """A checkpoint was refused before any part of it was loaded."""


def is_communication_error(error: BaseException) -> bool:
    """Return whether ``error`` was raised because other ranks did not take part."""
    if isinstance(error, (RankError, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and bool(_OF_GLOO.search(str(error)))


def in_words(error: BaseException) -> str:
    """Return the type and text of ``error``; for a :class:`CheckpointError` only the text."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def add_note(error: BaseException, note: str) -> None:
    """Add ``note`` to the text of ``error``, once: contexts within each other see the same error."""
    if not getattr(error, "_zerosync_noted", False):
        error.args = (f"{error}\n{note}", *error.args[1:])
        error._zerosync_noted = True  # type: ignore[attr-defined]
