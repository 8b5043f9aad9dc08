"""Surveys: what ranks tell each other of their changes before they gather them, so that all sizes are known (R7)."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import InFlight, gather_words, named_ranks
from zerosync_strategy.core.comm.differences import BITS, Plan, choose_plan, count

WORTH = 0.9
"""What is gathered goes in full where its code would have more than this share of its bytes."""
SURVEY_EVERY = 16
"""Steps after which that is looked at again."""
SMALLEST = 2**14
"""Bytes of a bucket in full below which it goes in full: its words in a survey would be above one in a hundred."""
WORDS = len(BITS) + 2
"""Of 64 bits, of a bucket in a survey."""


def words_of(new: torch.Tensor, old: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return the :data:`WORDS` of a bucket in a survey, of which the largest of any rank are to be found.

    Args:
        new, old: as for :func:`count`, of this rank.
        before: a digest of what all ranks had before.
    """
    return torch.cat([count(new, old), torch.stack([before, ~before])])


def are_alike(words: Sequence[int]) -> bool:
    """Return whether all ranks had the same digest, by the largest words."""
    return words[-2] == ~words[-1]


def worthwhile_plan(numel: int, words: Sequence[int], header: int) -> Plan | None:
    """Return the plan for rows of ``numel`` numbers, of ``header`` bytes more; ``None``: they are to go in full."""
    plan = choose_plan(numel, words[: len(BITS)])
    return plan if header + plan.nbytes <= WORTH * 2 * numel else None


def survey(
    by_bucket: Sequence[torch.Tensor], measured: Sequence[int], process_group: Any, *more: torch.Tensor
) -> torch.Tensor:
    """Return the largest words of any rank: of each bucket, what each has ``measured``, and ``more``. Collective.

    Args:
        by_bucket: of each, what :func:`words_of` returns, in the same order on all ranks.
        measured: :meth:`FasterWay.own_times`.
        more: words of 64 bits, on the same device.
    """
    from deepspeed import comm

    times = (by_bucket or more)[0].new_empty(len(measured))
    for word, each in zip(times, measured, strict=True):
        word.fill_(each)  # without a copy to the device, for which the host would wait
    words = torch.cat([*by_bucket, times, *more])
    comm.all_reduce(words, op=dist.ReduceOp.MAX, group=process_group)
    return words


def warn_of_others(before: int, names: str, process_group: Any) -> None:
    """Warn of the ranks that had other parameters than most before the step. Collective.

    Args:
        before: the digest of what this rank had.
        names: of the parameters.
    """
    words = [of_rank[0] for of_rank in gather_words([before], process_group)]
    common = Counter(words).most_common(1)[0][0]
    others = [rank for rank, each in enumerate(words) if each != common]
    warnings.warn(
        f"gather_changes: before this step, rank {named_ranks(process_group, others)} had other parameters than rank"
        f" {named_ranks(process_group, [words.index(common)])}, in {names}. They are gathered in full: each rank's part"
        " of them holds for all. Change parameters alike on all ranks.",
        stacklevel=3,
    )


class CodedGathers:
    """The gathers of coded rows that are in flight, which have a bounded number of bytes.

    Attributes:
        room: bytes that they may have.
    """

    def __init__(self, room: int = 0) -> None:
        self.room = room
        self._in_flight: list[tuple[int, InFlight]] = []

    def make_room(self, nbytes: int) -> None:
        """Let gathers arrive, the first first, until there is room for ``nbytes`` more, or none is in flight."""
        self._in_flight = [(size, gather) for size, gather in self._in_flight if not gather.is_done]
        while self._in_flight and sum(size for size, _ in self._in_flight) + nbytes > self.room:
            _, gather = self._in_flight.pop(0)
            gather.wait()

    def add(self, nbytes: int, gather: InFlight) -> None:
        """A gather of so many bytes was launched."""
        self._in_flight.append((nbytes, gather))

    def take_all(self) -> list[InFlight]:
        """Forget all; return those that have not arrived."""
        in_flight, self._in_flight = self._in_flight, []
        return [gather for _, gather in in_flight if not gather.is_done]
