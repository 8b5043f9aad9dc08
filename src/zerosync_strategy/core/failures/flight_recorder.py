"""Torch's flight recorder: the last collectives that this process has issued.

Torch records the last 2,000 collectives of NCCL and, in newer releases, of gloo (``TORCH_FR_BUFFER_SIZE``; 0 switches
it off), with the process group, the number, sizes and the Python stack of each. NCCL has a recorder of its own; a
process group that has both backends has its name in both, and numbers of its own in each. What is sent point to point
on gloo is in none, so ZeroSync's own exchanges are not (``comm/waits.py`` has them).
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
"""In the path of a file whose lines say nothing: it trains, whatever the program is."""
_PACKAGES = ("/site-packages/", "/dist-packages/")
"""In the path of a file that is installed, and so not the program's own."""
_GROUPS = 4
"""Of so many process groups the collectives are told, the last used first."""
_RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")
"""Torch's functions that return what was recorded: NCCL's, which a build with NCCL has, and that of other backends."""


@dataclass(frozen=True)
class Recorded:
    """A collective in torch's flight recorder.

    Attributes:
        number: among the group's collectives, from 1.
        name: torch's, with the backend's: ``"gloo:all_reduce"``.
        sizes: of its input.
        line: of the program, that issued it.
        label: ZeroSync's for it, where it is ZeroSync's; ``reduces``: it reduces gradients.
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
    def text(self) -> str:
        what = self.label or f"{self.name.rpartition(':')[2]} of {self.sizes or 'nothing'}"
        return f"{what} (collective {self.number} of group {self.group!r}{self.line and ', at ' + self.line})"


def program_line(frames: Iterable[tuple[str, int, str]]) -> str:
    """Return the innermost line of the program, as ``"train.py:24 main"``; empty if there is none.

    Where another package is between, as one that logs parameters, its line comes first: ``"logger.py:156 log <
    train.py:24 main"``. ``frames`` have path, line and function of each, the innermost first.
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
    """Return, by process group, the last collective of this process, and the first that is not complete.

    Takes some 20 ms, and the first time up to a second.
    """
    bindings: Any = torch._C._distributed_c10d
    found = [pickle.loads(getattr(bindings, name)()) for name in _RECORDERS if hasattr(bindings, name)]
    entries = [entry for each in found for entry in each.get("entries", ())]
    entries.sort(key=lambda entry: entry["time_created_ns"])  # stable: of one backend they stay in their order
    return _of_interest(entries, waits.labels_of_launched())


def _of_interest(
    entries: Iterable[Mapping[str, Any]], labels: Mapping[tuple[str, int], object]
) -> tuple[Recorded, ...]:
    # Collectives launched as a group share a number. Only the last entry with it, the group's, is ever complete.
    launched = {
        (entry["process_group"][0], _is_gloos(entry), entry["collective_seq_id"]): entry
        for entry in entries
        if not entry["is_p2p"]
    }
    last: dict[tuple[str, bool], Mapping[str, Any]] = {}
    incomplete: dict[tuple[str, bool], Mapping[str, Any]] = {}
    for entry in launched.values():
        group = entry["process_group"][0], _is_gloos(entry)
        last.pop(group, None)  # the last used comes last
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
    # gloo's entries are "scheduled" for ever, and retired when the work is complete; NCCL's when it has timed out too.
    return bool(entry["retired"]) if _is_gloos(entry) else entry["state"] == "completed"


def _named(entry: Mapping[str, Any], labels: Mapping[tuple[str, int], object]) -> Recorded:
    group, number = entry["process_group"][0], entry["collective_seq_id"]
    line = program_line((frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", ()))
    sizes = " and ".join(str(size) for size in entry["input_sizes"][:3])
    label = "" if _is_gloos(entry) else labels.get((group, number), "")  # of NCCL's, which alone are noted down
    reduces = isinstance(label, waits.OfReduction)
    return Recorded(group, number, entry["profiling_name"], sizes, line, _is_complete(entry), str(label), reduces)
