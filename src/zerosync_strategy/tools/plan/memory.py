"""The memory of live tensors by kind, and what it was when it was most."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FrameType

import torch

NODE_SHARDS = "node shards"
KINDS = ("parameters", "gradients", "optimizer", "gathered", NODE_SHARDS, "host", "buckets", "activations")

# Who allocates, by a part of the path of its file; the innermost that is in the table decides.
_BY_FILE = (
    ("/zerosync_strategy/core/gradients/flat.py", "gradients"),
    ("/zerosync_strategy/core/gradients/", "buckets"),
    ("/zerosync_strategy/core/params/host_cache.py", "host"),
    ("/zerosync_strategy/core/params/", "gathered"),
    ("/zerosync_strategy/core/comm/", "buckets"),
    ("/zerosync_strategy/core/optimizer/exchanged.py", "buckets"),
    ("/deepspeed/runtime/zero/partition", "gathered"),
    ("/deepspeed/runtime/zero/linear.py", "activations"),
    ("/deepspeed/runtime/zero/", "buckets"),
    ("/deepspeed/runtime/utils.py", "buckets"),
    ("/torch/optim/", "optimizer"),
)
_PASSED = (
    "/zerosync_strategy/tools/plan/memory.py", "/zerosync_strategy/tools/plan/skipped.py",
    "/zerosync_strategy/core/engine/", "/zerosync_strategy/core/gradients/local.py",
    "/zerosync_strategy/core/comm/nodes.py", "/torch/",
)  # fmt: skip


@dataclass
class _Storage:
    reference: weakref.ref[torch.UntypedStorage]
    kind: str
    nbytes: int
    is_written: bool = False


class Tally:
    """Bytes by kind: ``live`` now, and ``peak`` at the moment when they were most together since :meth:`restart`."""

    def __init__(self) -> None:
        self.live = dict.fromkeys(KINDS, 0)
        self.peak = dict(self.live)
        self._most = 0

    def add(self, kind: str, nbytes: int) -> None:
        self.live[kind] += nbytes
        if (total := sum(self.live.values())) > self._most:
            self._most, self.peak = total, dict(self.live)

    def restart(self) -> None:
        self.peak, self._most = dict(self.live), sum(self.live.values())


class Ledger:
    """Counts the storages of tensors, from the first time that one is seen until it is freed.

    Attributes:
        allocated: of all storages, as a device's allocator counts them, but for those that are the host's everywhere.
        written: of those that something was written to, to which alone a CPU's memory is given.
    """

    def __init__(self) -> None:
        self.allocated, self.written = Tally(), Tally()
        self._known: dict[int, _Storage] = {}

    def see(self, tensor: torch.Tensor, is_written: bool) -> None:
        """Count the storage of ``tensor`` from now on; its kind follows from who is running."""
        if tensor.device.type == "meta" or tensor.numel() == 0:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if (known := self._known.get(key)) is None:
            reference = weakref.ref(storage, lambda _: self._forget(key))
            known = self._known[key] = _Storage(reference, _kind(sys._getframe(1)), storage.nbytes())
            for tally in self._tallies(known):
                tally.add(known.kind, known.nbytes)
        if is_written and not known.is_written:
            known.is_written = True
            self.written.add(known.kind, known.nbytes)

    def is_gradient(self, tensor: torch.Tensor) -> None:
        """Count what autograd allocated for ``tensor`` as a gradient; what is a view of a buffer stays of its kind."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        if known is not None and known.kind == "activations":
            self._move(known, "gradients")

    def classify(self, tensors: Mapping[str, Iterable[torch.Tensor]]) -> None:
        """Count the storages of ``tensors`` by these kinds, whoever allocated them; of several, by the last."""
        for kind, of_kind in tensors.items():
            for tensor in of_kind:
                if (known := self._known.get(tensor.untyped_storage()._cdata)) is not None:
                    self._move(known, kind)

    def restart(self) -> None:
        self.allocated.restart()
        self.written.restart()

    def _move(self, known: _Storage, kind: str) -> None:
        for tally in self._tallies(known):
            tally.add(known.kind, -known.nbytes)
            tally.add(kind, known.nbytes)
        known.kind = kind

    def _forget(self, key: int) -> None:
        known = self._known.pop(key)
        for tally in self._tallies(known):
            tally.add(known.kind, -known.nbytes)

    def _tallies(self, known: _Storage) -> list[Tally]:
        tallies = [] if known.kind == "host" else [self.allocated]
        return [*tallies, self.written] if known.is_written else tallies


def _kind(frame: FrameType | None) -> str:
    while frame is not None:
        path = frame.f_code.co_filename
        for part, kind in _BY_FILE:
            if part in path:
                return kind
        if not any(part in path for part in _PASSED):
            return "activations"
        frame = frame.f_back
    return "activations"
