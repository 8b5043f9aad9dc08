"""Which exchange or collective this process waits for, and which it has launched: for errors.

The main thread records what it waits for; the thread that answers other ranks reads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

_KEPT = 1024
"""The most launched collectives to remember."""
_TAGS = 4096
"""The most tags of exchanges to remember."""
# torch's functions; each is one collective, and waits for it unless it is asynchronous.
_COLLECTIVES = frozenset(
    f"{name}{suffix}"
    for name in ("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "reduce", "reduce_scatter",
                 "scatter")
    for suffix in ("", "_single", "_into_tensor", "_tensor", "_coalesced")
)  # fmt: skip


class OfReduction(str):
    """The label of a wait for gradients, by which reducing ranks are recognised."""

    __slots__ = ()


class Exchange(NamedTuple):
    """Messages between ranks of a process group, off NCCL: its ``place``-th exchange of this tag."""

    process_group: Any
    name: str
    tag: int
    place: int
    messages: Sequence[tuple[int, Any, Any]]

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks of the process group that have to issue it, too."""
        return tuple(peer for peer, sent, received in self.messages if any(map(len, (*sent, *received))))


_waits_for = ""
_exchange: Exchange | None = None  # that it waits for, if it waits for messages
_failed = ""  # the last wait that ended with an error
_launched: deque[tuple[str, int, object]] = deque(maxlen=_KEPT)  # the backend's own collectives: group, number, label
_issued: dict[tuple[str, int], int] = {}  # numbers of exchanges by process group and tag, last used last


def launched(group: str, number: int, label: object) -> None:
    """Record that this rank has launched a collective of the backend's own; ``str(label)`` is for errors."""
    _launched.append((group, number, label))


def labels_of_launched() -> dict[tuple[str, int], object]:
    """Return the labels of the last launched collectives, by group and number."""
    return {(group, number): label for group, number, label in list(_launched)}


def issue(process_group: Any, tag: int, messages: Sequence[tuple[int, Any, Any]]) -> Exchange:
    """Record that this rank has issued an exchange of these messages, for verdicts on who waits in vain."""
    group: Any = dist.group.WORLD if process_group is None else process_group
    name = group.group_name
    # Messages of one tag meet in their order, so the ranks of an exchange count the same.
    place = _issued[name, tag] = _issued.pop((name, tag), 0) + 1
    if len(_issued) > _TAGS:
        del _issued[next(iter(_issued))]
    return Exchange(group, name, tag, place, messages)


def number_issued(name: str, tag: int) -> int:
    """Return how many exchanges with this tag this rank has issued over the process group of this ``name``."""
    return _issued.get((name, tag), 0)


def awaited() -> Exchange | None:
    """Return the exchange for which the main thread is blocked, if any."""
    return _exchange


class Waiting:
    """Around the wait for a collective, or an ``exchange`` of messages. A class: a generator would cost more."""

    __slots__ = ("_before", "_exchange", "_label")

    def __init__(self, label: str, exchange: Exchange | None = None) -> None:
        self._label, self._exchange = label, exchange

    def __enter__(self) -> None:
        global _waits_for, _exchange, _failed
        self._before = _waits_for, _exchange
        _waits_for, _exchange, _failed = self._label, self._exchange, ""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        global _waits_for, _exchange, _failed
        _waits_for, _exchange = self._before
        if error is not None:
            _failed = self._label


def describe_wait(frame: FrameType | None, failed: bool = False) -> str:
    """Return what the main thread waits for, or with ``failed`` the wait that failed; empty if it does not wait.

    Args:
        frame: its innermost frame, or the frame that has raised.
    """
    global _failed
    label = _waits_for or _failed  # the main thread is about to report it
    if failed:
        label, _failed = _failed, ""
    if label:
        return label
    while failed and frame is not None and not torch_collective(frame) and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    name = torch_collective(frame)
    return f"torch.distributed.{name}()" if name else ""


def reset() -> None:
    """Forget waits and launches, because the process groups are new."""
    global _failed
    _failed = ""
    _launched.clear()
    _issued.clear()


def torch_collective(frame: FrameType | None) -> str:
    """Return the name of the collective of torch that ``frame`` runs itself; empty if none."""
    if frame is None or not frame.f_code.co_filename.endswith("/torch/distributed/distributed_c10d.py"):
        return ""
    return frame.f_code.co_name if frame.f_code.co_name in _COLLECTIVES else ""
