"""Which exchange or collective this process waits for, and which it has launched: for errors.

The main thread records what it waits for; the thread that answers other ranks reads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_KEPT = 1024
"""The most launched collectives to remember."""
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


_waits_for = ""
_failed = ""  # the last wait that ended with an error
_launched: deque[tuple[str, int, object]] = deque(maxlen=_KEPT)  # the backend's own collectives: group, number, label


def launched(group: str, number: int, label: object) -> None:
    """Record that this rank has launched a collective of the backend's own; ``str(label)`` is for errors."""
    _launched.append((group, number, label))


def labels_of_launched() -> dict[tuple[str, int], object]:
    """Return the labels of the last launched collectives, by group and number."""
    return {(group, number): label for group, number, label in list(_launched)}


@contextmanager
def waiting(label: str) -> Iterator[None]:
    """Around the wait for an exchange."""
    global _waits_for, _failed
    before, _waits_for, _failed = _waits_for, label, ""
    try:
        yield
    except BaseException:
        _failed = label
        raise
    finally:
        _waits_for = before


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


def torch_collective(frame: FrameType | None) -> str:
    """Return the name of the collective of torch that ``frame`` runs itself; empty if none."""
    if frame is None or not frame.f_code.co_filename.endswith("/torch/distributed/distributed_c10d.py"):
        return ""
    return frame.f_code.co_name if frame.f_code.co_name in _COLLECTIVES else ""
