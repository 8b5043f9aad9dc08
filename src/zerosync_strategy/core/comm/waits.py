"""Which collective calls this process has issued, and in which it waits: for a thread that looks at both. On gloo.

Of a process group that has another backend for another device (``cpu:gloo,cuda:nccl``), these are the calls on the CPU.

A call has the same name on all ranks of its process group. An exchange of this package has a tag, and a number among
those with that tag. Torch numbers its collectives, but counts messages point to point with them, of which one rank may
send more than another: they are counted here and subtracted. Groups whose numbers may differ have no named calls.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.engine import patches

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
    """A call in which a thread waits, with its process group, and the label for it in errors."""

    call: Call
    process_group: Any
    thread: int
    label: str = ""


_point_to_point: Counter[str] = Counter()  # by group, since they are counted
_counting = threading.Lock()
_alike: set[str] = set()  # the groups whose collectives have the same numbers on all ranks
_exchanges: dict[str, dict[int, int]] = {}  # by group: the exchanges issued with each tag, the last used tag last
_waiting: Wait | None = None
_failed: Wait | None = None  # the last wait that ended with an error
_launched: deque[tuple[str, int, object]] = deque(maxlen=_KEPT)  # a backend's own collectives: group, number, label


def issue_exchange(process_group: Any, tag: int, label: str = "") -> Wait:
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
    return Wait(Call(group.group_name, "", tag, number), group, threading.get_ident(), label)


def launched(group: str, number: int, label: object) -> None:
    """Note down that this rank has launched a collective of the backend's own; ``str(label)`` is for errors."""
    _launched.append((group, number, label))


def labels_of_launched() -> dict[tuple[str, int], str]:
    """Return the labels of the last collectives that were launched, by group and number."""
    return {(group, number): str(label) for group, number, label in list(_launched)}


@contextmanager
def waiting(wait: Wait | None) -> Iterator[None]:
    """Around the wait for an exchange."""
    global _waiting, _failed
    before, _waiting, _failed = _waiting, wait, None
    try:
        yield
    except BaseException:
        _failed = wait
        raise
    finally:
        _waiting = before


def describe_wait(frame: FrameType | None, failed: bool = False) -> str:
    """Return what the main thread waits for, or with ``failed`` has waited for in vain; nothing if it does not wait.

    Args:
        frame: its innermost frame, or the one that has raised.
    """
    global _failed
    wait = _waiting
    if failed:
        wait, _failed = _failed, None
    if wait is not None and wait.label:
        return wait.label
    while failed and frame is not None and not torch_collective(frame) and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    name = torch_collective(frame)
    return f"torch.distributed.{name}()" if name else ""


def reset() -> None:
    """There are new process groups."""
    global _failed
    _failed = None
    _launched.clear()
    _exchanges.clear()
    _point_to_point.clear()
    _alike.clear()


def count_point_to_point() -> None:
    """Count what this process sends and receives over any process group, while ZeroSync is in use."""
    if not patches.is_installed(patches.SEND):
        _alike.clear()  # what was sent meanwhile was not counted
    for patch in (patches.SEND, patches.RECEIVE, patches.RECEIVE_ANY):
        patches.replace(patch, _counted)


def _counted(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def counted(group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if _are_gloos(group, tensors):
            with _counting:
                _point_to_point[group.group_name] += 1
        return stock(group, tensors, *args, **kwargs)

    return counted


def number_alike(process_group: Any) -> None:
    """The number of collectives over ``process_group`` is the same on all its ranks now, and will be."""
    _alike.add(process_group.group_name)


def is_numbered(process_group: Any) -> bool:
    """Whether ``process_group`` has gloo for what is on the CPU, also where it was made without naming a backend."""
    on_cpu = torch.device("cpu")
    return on_cpu in process_group._device_types and process_group._get_backend(on_cpu).name() == "gloo"


def _are_gloos(process_group: Any, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether gloo sends ``tensors`` over ``process_group``, which has it for what is on the CPU."""
    return all(
        tensor.device.type == "cpu" or process_group._get_backend(tensor.device).name() == "gloo" for tensor in tensors
    )


def _calls_gloo(process_group: Any, frame: FrameType) -> bool:
    """Whether the call of torch's in ``frame`` is gloo's: that of the group's only backend, or one on the CPU."""
    if all(process_group._get_backend(device).name() == "gloo" for device in process_group._device_types):
        return True
    given = frame.f_locals
    if "opts" in given and hasattr(given["opts"], "device"):  # a barrier has no tensor, and says on which device it is
        return given["opts"].device == torch.device("cpu")
    lists = (value if isinstance(value, (list, tuple)) else (value,) for value in given.values())
    tensors = [value for values in lists for value in values if isinstance(value, torch.Tensor)]
    return bool(tensors) and _are_gloos(process_group, tensors)


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
    if not isinstance(group, dist.ProcessGroup) or group.group_name not in _alike or not _calls_gloo(group, frame):
        return None
    return Wait(Call(group.group_name, name, 0, collectives_over(group)), group, thread)


def torch_collective(frame: FrameType | None) -> str:
    """Return the name of torch's collective whose own code ``frame`` runs, or nothing."""
    if frame is None or not frame.f_code.co_filename.endswith("/torch/distributed/distributed_c10d.py"):
        return ""
    return frame.f_code.co_name if frame.f_code.co_name in _COLLECTIVES else ""


def collectives() -> dict[str, int]:
    """Return how many of torch's collectives this rank has issued, by group; of groups that number them alike."""
    groups = list(dist.distributed_c10d._world.pg_map) if patches.is_installed(patches.SEND) else []
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
