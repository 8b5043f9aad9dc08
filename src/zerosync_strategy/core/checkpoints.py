"""What goes wrong with DeepSpeed's checkpoints, said in full."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from zerosync_strategy.core.rollcall import RankError
from zerosync_strategy.core.window import Window, WindowState

UNWRITABLE = "Is the disk full? Earlier checkpoints are as they were."
UNREADABLE = (
    "A file is missing or truncated, or it was written with another model, ZeRO stage, optimizer or number of ranks."
    " Some of the engine's parameters may be replaced: load an earlier checkpoint, or build the engine anew."
)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; ``__cause__`` has DeepSpeed's own error."""


@contextmanager
def said_in_full(what: str, remedy: str) -> Iterator[None]:
    """Around reading or writing files, whose errors say neither which nor why.

    Raises:
        CheckpointError: for what DeepSpeed and torch raise there.
    """
    try:
        yield
    except RankError:
        raise
    except (AssertionError, EOFError, KeyError, OSError, RuntimeError, ValueError) as error:
        message = f"Cannot {what}: {type(error).__name__}: {error}".rstrip(":. ")
        raise CheckpointError(f"{message}. {remedy}") from error


def warn_of_open(window: Window, what: str) -> None:
    """Where ``what`` comes in mid-window: its gradients are not in the checkpoint (W5)."""
    if window.state is not WindowState.CLOSED:
        warnings.warn(
            f"{what} with {window.backwards} backward(s) since the last optimizer step. Their gradients are"
            " not in the checkpoint: this process keeps them for its next step, but a run that resumes from the"
            " checkpoint starts from the last step without them. Checkpoint right after a step to avoid this.",
            stacklevel=3,
        )
