"""What a rank waits for, so that another rank can say whether it has issued the same (W4).

A key names a collective on all ranks: ``("messages", group, tag, place)`` for an exchange of messages, and ``(backend,
group, number, name, label)`` for one in torch's flight recorder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import FrameType
from typing import Any

import torch.distributed as dist

from zerosync_strategy.core.comm import journal
from zerosync_strategy.core.failures.flight_recorder import Entry, Recorded, find, first_incomplete

Key = tuple[Any, ...]
_MESSAGES = "messages"


class Issued(IntEnum):
    """What a rank has done about a collective that another rank waits for."""

    NOT_YET = 0
    SAME = 1  # or it cannot know
    OTHER = 2  # another one in its place: NCCL matches collectives by their order alone


@dataclass(frozen=True)
class Wait:
    """What a rank waits for.

    Attributes:
        members: the ranks that have to issue it, too; empty if unknown.
        blocks: the main thread is blocked, so the rank issues nothing before the wait ends. On NCCL, an incomplete
            collective may be of a rank that computes, or reads data.
    """

    key: Key
    members: tuple[int, ...] = ()
    blocks: bool = False


def wait_of(frame: FrameType | None, recorded: Sequence[Recorded]) -> Wait | None:
    """Return what this process waits for, from the innermost frame of its main thread and torch's flight recorder."""
    if (exchange := journal.awaited()) is not None:
        ranks = dist.get_process_group_ranks(exchange.process_group)
        key = _MESSAGES, exchange.name, exchange.tag, exchange.place
        return Wait(key, tuple(ranks[peer] for peer in exchange.peers), blocks=True)
    if frame is not None and journal.torch_collective(frame):
        group: Any = frame.f_locals.get("group") or dist.group.WORLD
        last = recorded[0] if recorded else None
        if last is None or last.complete or last.group != getattr(group, "group_name", ""):
            return None  # not issued yet, or this release of torch records no collectives of gloo
        return Wait(_key(last), tuple(dist.get_process_group_ranks(group)), blocks=True)
    pending = first_incomplete(recorded)
    return None if pending is None or pending.backend == "gloo" else Wait(_key(pending))


def issued(keys: Sequence[Key], entries: Sequence[Entry]) -> Iterator[Issued]:
    """Yield for each collective that a rank waits for whether this process has issued it, too."""
    for kind, group, number, *what in keys:
        if kind == _MESSAGES:
            yield Issued.SAME if journal.number_issued(group, number) >= what[0] else Issued.NOT_YET
            continue
        last, own = find(entries, group, kind, number)
        if last < number:
            yield Issued.NOT_YET
        else:
            yield Issued.SAME if own is None or _is_same(what, own) else Issued.OTHER


def _key(recorded: Recorded) -> Key:
    return recorded.backend, recorded.group, recorded.number, recorded.name, recorded.label


def _is_same(what: Sequence[str], own: Recorded) -> bool:
    name, label = what
    return name == own.name and (label == own.label or not label or not own.label)
