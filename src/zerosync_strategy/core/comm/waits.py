"""Which collective calls this process has issued, and in which it waits: for a thread that looks at both. On gloo.

A call has the same name on all ranks of its process group. What this package exchanges point to point has a tag, and a
number among the exchanges with that tag. Torch numbers its collectives, but counts what is sent point to point with
them, which may be more on one rank than on another: it is counted here and subtracted. Groups whose numbers are not
known to be alike on all ranks have no named calls.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

_KEPT = 1024
"""Tags of a group that are remembered: more than a rank can be ahead of another, which it waits for."""
_UNUSED_TAG = 2**31 - 1
# Of torch; each is one collective, and waits for it unless it is asynchronous.
_COLLECTIVES = frozenset(
    f"{name}{suffix}"
    for name in ("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "reduce", "reduce_scatter",
                 "scatter")
    for suffix in ("", "_single", "_into_tensor", "_tensor", "_coalesced")
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A collective call.

    Attributes:
        group: the name of its process group, the same on all ranks.
        name: torch's, or empty for an exchange point to point.
        tag: of an exchange.
        number: among the group's collectives, or among its exchanges with this tag.
    """

    group: str
    name: str
    tag: int
    number: int


@dataclass(frozen=True)
class Wait:
    """A call in which a thread waits, with its process group."""

    call: Call
    process_group: Any
    thread: int


_point_to_point: Counter[str] = Counter()  # by group, since they are counted
_alike: set[str] = set()  # the groups whose collectives have the same numbers on all ranks
_exchanges: dict[str, dict[int, int]] = {}  # by group: the exchanges issued with each tag, the last used tag last
_waiting: Wait | None = None


def issue_exchange(process_group: Any, tag: int) -> Wait:
    """Note down that this rank has sent what an exchange needs of it; return the wait for the others."""
    group: Any = process_group or dist.group.WORLD
    issued = _exchanges.setdefault(group.group_name, {})
    number = issued.pop(tag, 0) + 1
    issued[tag] = number
    if len(issued) > _KEPT:
        oldest = next(iter(issued))
        count = issued.pop(oldest)
        if oldest == 0:  # of what has no tag, which comes in every step
            issued[0] = count
    return Wait(Call(group.group_name, "", tag, number), group, threading.get_ident())


@contextmanager
def waiting(wait: Wait | None) -> Iterator[None]:
    """Around the wait for an exchange."""
    global _waiting
    before, _waiting = _waiting, wait
    try:
        yield
    finally:
        _waiting = before


def forget() -> None:
    """There are new process groups."""
    _exchanges.clear()
    _point_to_point.clear()
    _alike.clear()


def count_point_to_point() -> None:
    """Count from now on what this process sends and receives over any process group."""
    for name in ("send", "recv", "recv_anysource"):
        stock = getattr(dist.ProcessGroup, name)
        if not hasattr(stock, "zerosync"):
            setattr(dist.ProcessGroup, name, _counted(stock))


def _counted(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def counted(group: Any, *args: Any, **kwargs: Any) -> Any:
        _point_to_point[group.group_name] += 1
        return stock(group, *args, **kwargs)

    counted.zerosync = True  # type: ignore[attr-defined]
    return counted


def number_alike(process_group: Any) -> None:
    """The number of collectives over ``process_group`` is the same on all its ranks now, and will be."""
    _alike.add(process_group.group_name)


def collectives_over(process_group: Any) -> int:
    """Return how many of torch's collectives this rank has issued over ``process_group``, of gloo."""
    backend = process_group._get_backend(torch.device("cpu"))
    return int(backend._get_sequence_number_for_group()) - _point_to_point[process_group.group_name]


def current_wait(thread: int, frame: FrameType | None) -> Wait | None:
    """Return in what ``thread`` waits, whose innermost frame is ``frame``; it may be about to, or have just done so."""
    if _waiting is not None:
        return _waiting if _waiting.thread == thread else None
    name = torch_collective(frame)
    if frame is None or not name:
        return None
    group: Any = frame.f_locals.get("group") or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup) or group.group_name not in _alike:
        return None
    return Wait(Call(group.group_name, name, 0, collectives_over(group)), group, thread)


def torch_collective(frame: FrameType | None) -> str:
    """Return the name of torch's collective whose own code ``frame`` runs, or nothing."""
    if frame is None or not frame.f_code.co_filename.endswith("/torch/distributed/distributed_c10d.py"):
        return ""
    return frame.f_code.co_name if frame.f_code.co_name in _COLLECTIVES else ""


def collectives() -> dict[str, int]:
    """Return how many of torch's collectives this rank has issued, by group; of groups that number them alike."""
    groups = list(dist.distributed_c10d._world.pg_map)
    return {group.group_name: collectives_over(group) for group in groups if group.group_name in _alike}


def exchanges() -> dict[str, dict[int, int]]:
    """Return how many exchanges this rank has issued, by group and tag."""
    return {name: dict(issued) for name, issued in _exchanges.items()}


def give_up(process_group: Any) -> None:
    """Let all that waits on ``process_group`` fail, on this rank and its peers. No more can be sent over it.

    gloo has no call for this, but does it when a receive runs into its timeout.
    """
    other = (dist.get_rank(process_group) + 1) % dist.get_world_size(process_group)
    backend = process_group._get_backend(torch.device("cpu"))
    try:
        backend.recv([torch.empty(1)], other, _UNUSED_TAG).wait(timedelta(milliseconds=1))
    except RuntimeError:
        return
