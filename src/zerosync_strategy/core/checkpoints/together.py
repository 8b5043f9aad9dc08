"""What all ranks do, or none: each tries its part, and one small collective says whether all could (K2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from zerosync_strategy.core.checkpoints.manifests import DamageError
from zerosync_strategy.core.failures.agreement import said_by_ranks
from zerosync_strategy.core.failures.answers import ranks_text
from zerosync_strategy.core.failures.checkpoint_errors import CheckpointError
from zerosync_strategy.core.failures.rank_status import RankError, is_communication_error

Found = TypeVar("Found")
_FAILED = "!"


def together(what: str, part: Callable[[], tuple[str, Found]], remedy: Callable[[], str]) -> Found:
    """Call ``part`` on every rank; return what it returned beside its facts, if they are the same everywhere.

    Collective: 64 bytes are reduced if all is well. An error of the communication is raised as it is.

    Args:
        what: all ranks do, for the error.
        part: this rank's; returns its facts in words, and its result.
        remedy: returns the end of the error, on every rank. May be collective.

    Raises:
        CheckpointError: on every rank: one has failed, or the facts differ.
    """
    result: list[Found] = []
    failed: Exception | None = None
    try:
        said, found = part()
        result.append(found)
    except Exception as error:
        if isinstance(error, RankError) or is_communication_error(error):
            raise
        failed, said = error, _FAILED + _in_words(error)
    kinds = said_by_ranks(said, None)
    if failed is None and len(kinds) == 1:
        return result[0]
    problems = {text.removeprefix(_FAILED): ranks for text, ranks in kinds.items() if text.startswith(_FAILED)}
    shown = problems or kinds
    if len(kinds) == 1:
        found_text = next(iter(shown))
    else:
        found_text = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in shown.items())
    if not problems:
        found_text = f"the ranks differ: {found_text}"
    raise CheckpointError(f"Cannot {what}: {found_text.rstrip(':. ')}. {remedy()}".rstrip()) from failed


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, DamageError) else f"{type(error).__name__}: {error}"
