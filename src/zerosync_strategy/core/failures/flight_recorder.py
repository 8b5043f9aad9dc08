"""Torch's flight recorder: the last collectives that this process has issued.

Torch records the last 2,000 collectives of NCCL and, in newer releases, of gloo (``TORCH_FR_BUFFER_SIZE``; 0 switches
it off), each with its process group, number, sizes and Python stack. NCCL has a recorder of its own. A process group
with both backends appears in both, under the same name and with separate numbers. Point-to-point messages on gloo are
in neither, so ZeroSync's own exchanges are not recorded (``comm/waits.py`` tracks them).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zerosync_strategy.core.comm import waits

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
    """Return the innermost line of the program, as ``"train.py:24 main"``; empty if there is none.

    If another package is called in between, as a logger of parameters, its line is first: ``"logger.py:156 log <
    train.py:24 main"``. ``frames`` are path, line and function, innermost first.
    """
    package = ""
    for path, line, function in frames:
        if not any(library in path for library in _LIBRARIES):
            found = f"{path.rpartition('/')[2]}:{line} {function}"
            if not any(folder in path for folder in _PACKAGES):
                return f"{package} < {found}" if package else found
            package = package or found
    return package


def recorded() -> tuple[Recorded, ...]:
    """Return the last collective of this process by process group, and the first incomplete one.

    Takes some 20 ms, and the first time up to a second.
    """
    bindings: Any = torch._C._distributed_c10d
    found = [pickle.loads(getattr(bindings, name)()) for name in _RECORDERS if hasattr(bindings, name)]
    entries = [entry for each in found for entry in each.get("entries", ())]
    entries.sort(key=lambda entry: entry["time_created_ns"])  # stable: keeps the order within a backend
    return _of_interest(entries, waits.labels_of_launched())


def _of_interest(
    entries: Iterable[Mapping[str, Any]], labels: Mapping[tuple[str, int], object]
) -> tuple[Recorded, ...]:
    # Collectives launched as a group share a number. The last entry with it is the group's, which has no sizes and is
    # the only one that is ever complete. Names and numbers repeat where a process group is made anew.
    launched: dict[tuple[object, ...], Mapping[str, Any]] = {}
    for entry in entries:
        if not entry["is_p2p"]:
            key = entry["process_group"][0], _is_gloos(entry), entry.get("pg_id"), entry["collective_seq_id"]
            first = launched.pop(key, entry)
            is_group = entry["profiling_name"] == "nccl:coalesced"
            launched[key] = {**first, "state": entry["state"]} if is_group else entry
    last: dict[tuple[str, bool], Mapping[str, Any]] = {}
    incomplete: dict[tuple[str, bool], Mapping[str, Any]] = {}
    for entry in launched.values():
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


def _is_gloos(entry: Mapping[str, Any]) -> bool:
    return bool(entry["profiling_name"].startswith("gloo"))


def _is_complete(entry: Mapping[str, Any]) -> bool:
    # gloo's entries stay "scheduled", and are retired when the work is complete; NCCL's are also when it times out.
    return bool(entry["retired"]) if _is_gloos(entry) else entry["state"] == "completed"


def _named(entry: Mapping[str, Any], labels: Mapping[tuple[str, int], object]) -> Recorded:
    group, number = entry["process_group"][0], entry["collective_seq_id"]
    line = program_line((frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", ()))
    sizes = " and ".join(str(size) for size in entry["input_sizes"][:3])
    label = "" if _is_gloos(entry) else labels.get((group, number), "")  # labels are recorded for NCCL alone
    reduces = isinstance(label, waits.OfReduction)
    return Recorded(group, number, entry["profiling_name"], sizes, line, _is_complete(entry), str(label), reduces)
