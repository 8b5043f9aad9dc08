"""Errors of DeepSpeed's checkpoints that name the path and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerosync_strategy.core.engine.universal import LATEST, other_ranks_error
from zerosync_strategy.core.failures.rank_status import RankError

UNWRITABLE = "Is the disk full? Earlier checkpoints are as they were."
UNREADABLE = (
    "A file is missing or truncated, or it was written with another model, ZeRO stage, optimizer or number of ranks"
    " (for which DeepSpeed's ds_to_universal converts it, to be loaded with 'checkpoint': {'load_universal': true})."
    " Some of the engine's parameters may be replaced: load an earlier checkpoint, or build the engine anew."
)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; ``__cause__`` has DeepSpeed's own error."""


def missing(path: Any, tag: Any, latest: str) -> str:
    """Return what is missing where DeepSpeed looks for the checkpoint ``tag``, and the remedy; empty if it is there.

    Args:
        path, tag: of ``load_checkpoint``.
        latest: the file that names the tag where none is given.
    """
    directory = Path(path)
    if tag is None and (directory / latest).is_file():
        tag = (directory / latest).read_text().strip()
    if tag is None and latest == LATEST:
        return (
            f"It has no file {latest!r}, which DeepSpeed's ds_to_universal leaves there. Nothing was loaded: convert"
            " the checkpoint, or give the tag= of the converted one."
        )
    if tag is None or (directory / str(tag)).is_dir():
        return ""
    if not directory.is_dir():
        return f"{path} is no directory. Nothing was loaded: give the one that save_checkpoint() was called with."
    tags = ", ".join(sorted(repr(entry.name) for entry in directory.iterdir() if entry.is_dir())) or "no checkpoint"
    return f"It has no tag {str(tag)!r}. Nothing was loaded: give a tag= that it has ({tags}), or another directory."


@contextmanager
def wrap_checkpoint_errors(what: str, remedy: str) -> Iterator[None]:
    """Around reading or writing files, whose errors name neither the path nor the cause.

    Raises:
        CheckpointError: for what DeepSpeed and torch raise there.
    """
    try:
        yield
    except RankError:
        raise
    except (AssertionError, EOFError, KeyError, OSError, RuntimeError, ValueError, other_ranks_error()) as error:
        message = f"Cannot {what}: {type(error).__name__}: {error}".rstrip(":. ")
        raise CheckpointError(f"{message}. {remedy}") from error
