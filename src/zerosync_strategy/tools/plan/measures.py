"""What a replay measures: the memory of live tensors by kind, and what this process sends, whoever issues it."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Self

from zerosync_strategy.core.comm.collectives import is_native
from zerosync_strategy.core.comm.journal import SentCounter
from zerosync_strategy.core.engine.patches import replaced

NODE_SHARDS = "node shards"
KINDS = ("parameters", "gradients", "optimizer", "gathered", NODE_SHARDS, "buckets", "activations")

# Kind of memory by a part of the path of the allocating file; the innermost frame that matches decides.
_BY_FILE = (
    ("/zerosync_strategy/core/gradients/", "buckets"),
    ("/zerosync_strategy/core/params/", "gathered"),
    ("/zerosync_strategy/core/comm/streams.py", "host"),
    ("/zerosync_strategy/core/comm/", "buckets"),
    ("/zerosync_strategy/core/optimizer/exchanged.py", "buckets"),
    ("/deepspeed/runtime/zero/partition", "gathered"),
    ("/deepspeed/runtime/zero/linear.py", "activations"),
    ("/deepspeed/runtime/zero/", "buckets"),
    ("/deepspeed/runtime/utils.py", "buckets"),
    ("/torch/optim/", "optimizer"),
)
_PASSED = (
    "/zerosync_strategy/tools/plan/measures.py", "/zerosync_strategy/tools/plan/skipped.py",
    "/zerosync_strategy/core/engine/", "/torch/",
)  # fmt: skip


@dataclass
class _Storage:
    reference: weakref.ref[torch.UntypedStorage]
    kind: str
    nbytes: int


class Ledger:
    """Counts the storages of tensors, each from the first time it is seen until it is freed, as an allocator does.

    Memory that is on the host with any device (kind ``"host"``) does not count.

    Attributes:
        live: bytes by kind now.
        peak: bytes by kind at the moment, since :meth:`restart`, when their sum was largest.
    """

    def __init__(self) -> None:
        self.live = dict.fromkeys(KINDS, 0)
        self.peak = dict(self.live)
        self._known: dict[int, _Storage] = {}

    def see(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` from now on; the running code determines its kind."""
        if tensor.device.type == "meta" or tensor.numel() == 0:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            reference = weakref.ref(storage, lambda _: self._forget(key))
            known = self._known[key] = _Storage(reference, _kind(sys._getframe(1)), storage.nbytes())
            self._add(known.kind, known.nbytes)

    def note_gradient(self, tensor: torch.Tensor) -> None:
        """Count memory that autograd allocated for ``tensor`` as a gradient; views of buffers keep their kind."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        if known is not None and known.kind == "activations":
            self._move(known, "gradients")

    def classify(self, tensors: Mapping[str, Iterable[torch.Tensor]]) -> None:
        """Count the storages of ``tensors`` by the given kinds from now on; a later kind overrides an earlier one."""
        for kind, of_kind in tensors.items():
            for tensor in of_kind:
                if (known := self._known.get(tensor.untyped_storage()._cdata)) is not None:
                    self._move(known, kind)

    @contextmanager
    def following_resizes(self, to_zeros: bool = True) -> Iterator[None]:
        """While active, a storage counts with the bytes to which it was last resized; ``to_zeros``: fill it with zeros.

        Storages of large tensors, which take no memory, are not really resized.
        """
        stock = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            if (known := self._known.get(storage._cdata)) is not None:
                self._add(known.kind, nbytes - known.nbytes)
                known.nbytes = nbytes
            if not storage.resizable():
                return storage
            resized = stock(storage, nbytes)
            return resized.fill_(0) if to_zeros else resized

        with replaced(torch.UntypedStorage, "resize_", resize_):
            yield

    def restart(self) -> None:
        self.peak = dict(self.live)

    def _add(self, kind: str, nbytes: int) -> None:
        if kind != "host":
            self.live[kind] += nbytes
            if nbytes > 0 and sum(self.live.values()) > sum(self.peak.values()):
                self.peak = dict(self.live)

    def _move(self, known: _Storage, kind: str) -> None:
        self._add(known.kind, -known.nbytes)
        self._add(kind, known.nbytes)
        known.kind = kind

    def _forget(self, key: int) -> None:
        known = self._known.pop(key)
        self._add(known.kind, -known.nbytes)


def _kind(frame: FrameType | None) -> str:
    while frame is not None:
        path = frame.f_code.co_filename
        if kind := next((kind for part, kind in _BY_FILE if part in path), ""):
            return kind
        if not any(part in path for part in _PASSED):
            break
        frame = frame.f_back
    return "activations"


# By method of torch's process groups: the name of the collective, and the argument that is its payload. Some methods
# have two names, of which torch 2.13 calls the second.
_METHODS = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "allgather": ("all_gather", 0),
    "allgather_coalesced": ("all_gather", 0),
    "_allgather_base": ("all_gather_into_tensor", 0),
    "all_gather_single": ("all_gather_into_tensor", 0),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor", 0),
    "all_gather_single_coalesced": ("all_gather_into_tensor", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 1),
    "reduce_scatter_single": ("reduce_scatter_tensor", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor", 1),
    "reduce": ("reduce", 0),
    "broadcast": ("broadcast", 0),
    "alltoall_base": ("all_to_all_single", 1),
    "all_to_all_single": ("all_to_all_single", 1),
    "alltoall": ("all_to_all", 1),
    "send": ("isend", 0),
}
_running: list[ProcessCounter] = []
_stock: dict[str, Any] = {}  # methods, while a counter runs


class ProcessCounter(SentCounter):
    """Counts all collectives and messages of this process between ``start`` and ``stop``, in its agreements too.

    Usable as a context manager. gloo has no reduce-scatter and sends an all-reduce instead, which is what is counted.
    """

    def start(self) -> Self:
        if not _running:
            for name in vars(dist.ProcessGroup).keys() & _METHODS.keys():
                _stock[name] = vars(dist.ProcessGroup)[name]
                setattr(dist.ProcessGroup, name, _counted(name, getattr(dist.ProcessGroup, name)))
        _running.append(self)
        return self

    def stop(self) -> None:
        _running.remove(self)
        while _stock and not _running:
            setattr(dist.ProcessGroup, *_stock.popitem())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _counted(name: str, stock: Callable[..., object]) -> Callable[..., object]:
    kind, payload = _METHODS[name]

    @functools.wraps(stock)
    def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> object:
        tensors = _tensors(args[payload])
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if kind.startswith("reduce_scatter") and not is_native(group, tensors[0].device):
            nbytes *= 2
        if kind == "reduce" and args[1].rootRank == group.rank():
            nbytes = 0
        for counter in _running:
            if kind == "isend":
                counter.add_messages([(args[1], tensors, ())], group)
            else:
                counter.add(kind, nbytes, group)
        return stock(group, *args, **kwargs)

    return method


def _tensors(payload: Any) -> list[torch.Tensor]:
    return [payload] if isinstance(payload, torch.Tensor) else [each for part in payload for each in _tensors(part)]
