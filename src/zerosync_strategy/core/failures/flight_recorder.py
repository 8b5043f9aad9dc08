"""The collectives that this process has issued, as torch's flight recorder has them, and what it waits for (W4).

Torch records the last 2,000 collectives of NCCL and, in newer releases, of gloo (``TORCH_FR_BUFFER_SIZE``; 0 switches
it off), each with its process group, number, sizes and Python stack. NCCL has a recorder of its own. A process group
with both backends appears in both, under the same name and with separate numbers. Point-to-point messages on gloo are
in neither, so ZeroSync's own exchanges are not recorded (``comm/journal.py`` tracks them).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm import journal

_LIBRARIES = (
    "/torch/", "/deepspeed/", "/lightning/", "/pytorch_lightning/", "/accelerate/", "/transformers/",
    "/zerosync_strategy/", "/contextlib.py", "/typing_extensions.py",
)  # fmt: skip
"""Parts of the paths of training libraries, whose lines do not identify the program."""
_PACKAGES = ("/site-packages/", "/dist-packages/")
"""Parts of the paths of installed files, which are not the program's own."""
_GROUPS = 4
"""Most process groups whose collectives are reported, last used first."""
_RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")
"""Torch's functions that return the records: of NCCL, if built with it, and of other backends."""


@dataclass(frozen=True)
class Recorded:
    """A collective in torch's flight recorder.

    Attributes:
        number: among the group's collectives, from 1.
        name: torch's name, with the backend: ``"gloo:all_reduce"``.
        sizes: of its input.
        line: the line of the program that issued it.
        label: ZeroSync's name for it, if ZeroSync issued it; ``reduces``: it reduces gradients.
    """

    group: str
    number: int
    name: str
    sizes: str = ""
    line: str = ""
    complete: bool = True
    label: str = ""
    reduces: bool = False

    @property
    def backend(self) -> str:
        return self.name.partition(":")[0]

    @property
    def text(self) -> str:
        what = self.label or f"{self.name.rpartition(':')[2]} of {self.sizes or 'nothing'}"
        return f"{what} (collective {self.number} of group {self.group!r}{self.line and ', at ' + self.line})"


def program_line(frames: Iterable[tuple[str, int, str]]) -> str:
    """Return the program's innermost line among ``frames``, as ``"train.py:24 main"``; empty if there is none.

    If the program calls through another package, such as a logger, its line comes first: ``"logger.py:156 log <
    train.py:24 main"``. ``frames``: path, line and function, innermost first.
    """
    package = ""
    for path, line, function in frames:
        if not any(library in path for library in _LIBRARIES):
            found = f"{path.rpartition('/')[2]}:{line} {function}"
            if not any(folder in path for folder in _PACKAGES):
                return f"{package} < {found}" if package else found
            package = package or found
    return package


Entry = Mapping[str, Any]


def entries() -> list[Entry]:
    """Return what torch has recorded of this process, oldest first. Takes some 20 ms, the first time up to a second.

    Collectives launched as a group share a number: the last entry with it is the group's, which has no sizes and is the
    only one that is ever complete. So of each group, the first entry is returned, with the state of the last.
    """
    bindings: Any = torch._C._distributed_c10d
    found = [pickle.loads(getattr(bindings, name)()) for name in _RECORDERS if hasattr(bindings, name)]
    of_all = [entry for each in found for entry in each.get("entries", ())]
    of_all.sort(key=lambda entry: entry["time_created_ns"])  # stable: keeps the order within a backend
    launched: dict[tuple[object, ...], Entry] = {}  # names and numbers repeat where a process group is made anew
    for entry in of_all:
        if not entry["is_p2p"]:
            key = entry["process_group"][0], _is_gloos(entry), entry.get("pg_id"), entry["collective_seq_id"]
            first = launched.pop(key, entry)
            is_group = entry["profiling_name"] == "nccl:coalesced"
            launched[key] = {**first, "state": entry["state"]} if is_group else entry
    return list(launched.values())


def recorded(of_process: Sequence[Entry] | None = None) -> tuple[Recorded, ...]:
    """Return each process group's last collective, followed by its first incomplete one; last used groups first.

    ``of_process``: the result of :func:`entries`, if there is one already.
    """
    labels = journal.labels_of_launched()
    last: dict[tuple[str, bool], Entry] = {}
    incomplete: dict[tuple[str, bool], Entry] = {}
    for entry in entries() if of_process is None else of_process:
        group = entry["process_group"][0], _is_gloos(entry)
        last.pop(group, None)  # keeps the last used group at the end
        last[group] = entry
        if not _is_complete(entry):
            incomplete.setdefault(group, entry)
    found = []
    for group in list(last)[::-1][:_GROUPS]:
        found.append(_named(last[group], labels))
        if group in incomplete and incomplete[group] is not last[group]:
            found.append(_named(incomplete[group], labels))
    return tuple(found)


def find(of_process: Sequence[Entry], group: str, backend: str, number: int) -> tuple[int, Recorded | None]:
    """Return the last recorded number of a process group and backend, or 0, and the collective with ``number``."""
    of_name = [
        entry for entry in of_process if entry["process_group"][0] == group and _is_gloos(entry) == (backend == "gloo")
    ]
    by_number = {
        entry["collective_seq_id"]: entry for entry in of_name if entry.get("pg_id") == of_name[-1].get("pg_id")
    }
    found = by_number.get(number)
    return max(by_number, default=0), None if found is None else _named(found, journal.labels_of_launched())


def first_incomplete(records: Sequence[Recorded]) -> Recorded | None:
    """Return the first incomplete collective of the last used process group that has any."""
    incomplete = [each for each in records if not each.complete]
    group = (incomplete[0].group, incomplete[0].backend) if incomplete else None
    of_group = (each for each in incomplete if (each.group, each.backend) == group)
    return min(of_group, key=lambda each: each.number, default=None)


def _is_gloos(entry: Entry) -> bool:
    return bool(entry["profiling_name"].startswith("gloo"))


def _is_complete(entry: Entry) -> bool:
    # gloo's entries stay "scheduled", and are retired when the work is complete; NCCL's are also when it times out.
    return bool(entry["retired"]) if _is_gloos(entry) else entry["state"] == "completed"


def _named(entry: Entry, labels: Mapping[tuple[str, int], object]) -> Recorded:
    group, number = entry["process_group"][0], entry["collective_seq_id"]
    line = program_line((frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", ()))
    sizes = " and ".join(str(size) for size in entry["input_sizes"][:3])
    label = "" if _is_gloos(entry) else labels.get((group, number), "")  # labels are recorded for NCCL alone
    reduces = isinstance(label, journal.OfReduction)
    return Recorded(group, number, entry["profiling_name"], sizes, line, _is_complete(entry), str(label), reduces)


# ---- what another rank waits for -------------------------------------------------------------------------------------


Key = tuple[Any, ...]
"""Names a collective on all ranks: ``("messages", group, tag, number)`` for an exchange of messages, and ``(backend,
group, number, name, label)`` for one in torch's flight recorder."""
_MESSAGES = "messages"


class Issued(IntEnum):
    """Whether a rank has issued a collective that another rank waits for."""

    NOT_YET = 0
    SAME = 1  # it has, or cannot know
    OTHER = 2  # it has issued another one under that number: NCCL matches collectives by their order alone


@dataclass(frozen=True)
class Wait:
    """What a rank waits for.

    Attributes:
        members: the ranks that take part in it; empty if unknown.
        blocks: the main thread is blocked, so the rank issues nothing until the wait ends. On NCCL it may be computing
            or reading data while a collective is incomplete.
    """

    key: Key
    members: tuple[int, ...] = ()
    blocks: bool = False


def wait_of(frame: FrameType | None, of_process: Sequence[Recorded]) -> Wait | None:
    """Return what this process waits for, from the innermost frame of its main thread and torch's flight recorder."""
    if (exchange := journal.awaited()) is not None:
        ranks = dist.get_process_group_ranks(exchange.process_group)
        key = _MESSAGES, exchange.name, exchange.tag, exchange.number
        return Wait(key, tuple(ranks[peer] for peer in exchange.peers), blocks=True)
    if frame is not None and journal.torch_collective(frame):
        group: Any = frame.f_locals.get("group") or dist.group.WORLD
        last = of_process[0] if of_process else None
        if last is None or last.complete or last.group != getattr(group, "group_name", ""):
            return None  # not issued yet, or this release of torch records no collectives of gloo
        return Wait(_key(last), tuple(dist.get_process_group_ranks(group)), blocks=True)
    pending = first_incomplete(of_process)
    return None if pending is None or pending.backend == "gloo" else Wait(_key(pending))


def issued(keys: Sequence[Key], of_process: Sequence[Entry]) -> Iterator[Issued]:
    """Yield for each collective that a rank waits for whether this process has issued it, too."""
    for kind, group, number, *what in keys:
        if kind == _MESSAGES:
            yield Issued.SAME if journal.number_issued(group, number) >= what[0] else Issued.NOT_YET
            continue
        last, own = find(of_process, group, kind, number)
        if last < number:
            yield Issued.NOT_YET
        else:
            yield Issued.SAME if own is None or _is_same(what, own) else Issued.OTHER


def _key(of: Recorded) -> Key:
    return of.backend, of.group, of.number, of.name, of.label


def _is_same(what: Sequence[str], own: Recorded) -> bool:
    name, label = what
    return name == own.name and (label == own.label or not label or not own.label)
