"""A record of communication: names for profiles, bytes sent for reports, launches and waits for errors.

:class:`SentCounter` counts what one attached engine sends, when it issues collectives. The rest is about the process:
which exchange or collective it waits for, and which it has launched. The main thread records it; the thread that
answers other ranks reads it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from zerosync_strategy.core.engine.patches import replaced

_NOTHING = nullcontext()


def phase(name: str, detail: str = "") -> AbstractContextManager[object]:
    """Name what runs here ``zerosync::name(detail)`` in profiles; costs next to nothing where nobody profiles."""
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return _NOTHING
    return torch.profiler.record_function(f"zerosync::{name}({detail})" if detail else f"zerosync::{name}")


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind: the calls, the bytes that one rank sends, and how many of these go to other nodes.

    Bytes are those of a bandwidth-optimal algorithm for the group's size, as a mean over the ranks; for ``isend`` and
    ``reduce``, those of this rank.
    """

    calls: int = 0
    bytes: int = 0
    between: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.bytes + other.bytes, self.between + other.between)


Message = tuple[int, Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""A rank of a process group, what is sent to it, and what is received from it, in order."""
_Call = tuple[str, int, ProcessGroup, int | None]
"""Its kind, the bytes of its payload, its process group, and its only destination, a rank of that."""
_Calls = defaultdict[_Call, int]
_WHOLE = ("isend", "reduce")  # their payload is sent as it is: of other kinds, each of W ranks sends (W-1)/W of it


class SentCounter:
    """Counts what one engine sends, by DeepSpeed's names of the collectives.

    A payload is the larger of a rank's input and output. Small agreements of words and objects are not counted.

    Args:
        between: of a topology (:meth:`~nodes.Topology.between`); ``None``: all ranks are on one node.
    """

    def __init__(self, between: Callable[[int, ProcessGroup, int | None, bool], int] | None = None) -> None:
        self.between = between
        # How many there were of each; what they sent is computed when it is asked for.
        self._of_step: _Calls = defaultdict(int)
        self._apart: dict[str, _Calls] = defaultdict(partial(defaultdict, int))  # by section
        self._calls = self._of_step  # where calls count now

    def add(self, kind: str, nbytes: int, process_group: ProcessGroup) -> None:
        """Count a collective with a payload of ``nbytes``."""
        self._calls[kind, nbytes, process_group, None] += 1

    def add_messages(self, messages: Iterable[Message], process_group: ProcessGroup) -> None:
        """Count the tensors that are sent to each rank of ``process_group``; those of no elements are not sent."""
        for peer, sent, _ in messages:
            for tensor in sent:
                if nbytes := tensor.nbytes:
                    self._calls["isend", nbytes, process_group, peer] += 1

    def apart(self, section: str) -> AbstractContextManager[None]:
        """Around what is no part of a step: what is sent inside counts for the outermost ``section``."""
        is_outermost = self._calls is self._of_step
        return replaced(self, "_calls", self._apart[section] if is_outermost else self._calls)

    @property
    def traffic(self) -> Mapping[str, Traffic]:
        """What was sent for a step since the last :meth:`take`, by kind."""
        return self._traffic(self._of_step)

    def take(self) -> Mapping[str, Traffic]:
        """Return :attr:`traffic`, and begin anew."""
        traffic = self._traffic(self._of_step)
        self._of_step.clear()
        return traffic

    def take_apart(self) -> Mapping[str, int]:
        """Return the bytes sent since the last call that were not part of a step, by section."""
        sections = {section: calls for section, calls in self._apart.items() if calls}
        nbytes = {name: sum(each.bytes for each in self._traffic(calls).values()) for name, calls in sections.items()}
        for calls in sections.values():
            calls.clear()
        return nbytes

    def _traffic(self, calls: _Calls) -> dict[str, Traffic]:
        sums: dict[str, tuple[int, int, int]] = {}
        for (kind, nbytes, group, peer), count in calls.items():
            sent, to = nbytes, None if peer is None else dist.get_global_rank(group, peer)
            if kind not in _WHOLE:
                ranks = dist.get_world_size(group)
                sent = (2 if kind == "all_reduce" else 1) * nbytes * (ranks - 1) // ranks
            between = 0
            if self.between is not None:
                between = self.between(sent, group, to, kind.startswith("all_to_all"))
            calls_before, bytes_before, between_before = sums.get(kind, (0, 0, 0))
            sums[kind] = calls_before + count, bytes_before + count * sent, between_before + count * between
        return {kind: Traffic(*numbers) for kind, numbers in sums.items()}


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
    """The label of a wait for a reduction of gradients; verdicts recognise reducing ranks by its type."""

    __slots__ = ()


class Exchange(NamedTuple):
    """Messages between ranks of a process group, off NCCL: its ``number``-th exchange of this tag."""

    process_group: ProcessGroup
    name: str
    tag: int
    number: int
    messages: Sequence[Message]

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks of the process group with which it exchanges elements."""
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


def issue(process_group: ProcessGroup, tag: int, messages: Sequence[Message]) -> Exchange:
    """Record that this rank has issued an exchange of these messages; return the record, for verdicts."""
    group: Any = dist.group.WORLD if process_group is None else process_group
    name = group.group_name
    # Messages of one tag meet in their order, so the ranks of an exchange count the same.
    number = _issued[name, tag] = _issued.pop((name, tag), 0) + 1
    if len(_issued) > _TAGS:
        del _issued[next(iter(_issued))]
    return Exchange(group, name, tag, number, messages)


def number_issued(name: str, tag: int) -> int:
    """Return how many exchanges with this tag this rank has issued over the process group of this ``name``."""
    return _issued.get((name, tag), 0)


def awaited() -> Exchange | None:
    """Return the exchange for which the main thread is blocked, if any."""
    return _exchange


class Waiting:
    """Around a wait for a collective, or an ``exchange`` of messages. A class costs less than a generator."""

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
