"""One storage for the values of the parameters of a unit: one allocation for a gather, and one release.

A parameter is contiguous in it, as one row of the shard of each rank, so a backend can gather into it. What shares a
storage comes and goes together; what only some of a unit's parameters do, as to be held, gives them storages of their
own. A parameter of several units has its own, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from zerosync_strategy.core.engine.parameter import Record

ALIGNMENT = 256
"""Bytes: each parameter begins at a multiple of them, as if it had been allocated alone on a GPU (at least 512)."""


class UnitStorage:
    """The storage of the values of ``records``. It is as large as all of them, or of no bytes if all are sharded.

    It stays the same between a forward and its backward, so what autograd has saved of a parameter, itself or a view,
    has its values again once they are unsharded.

    Attributes:
        owner: the stream that has allocated its bytes; ``None`` on a device without streams.
        inside: how many of ``records`` have their values in it, or will once a gather has arrived.
    """

    __slots__ = ("_has_bytes", "_memory", "_nbytes", "_on_host", "_references", "inside", "owner", "records")

    def __init__(self, records: Sequence[Record]) -> None:
        dtype, device = records[0].param.ds_tensor.dtype, records[0].none.device
        step = max(1, ALIGNMENT // dtype.itemsize)
        sizes = [each.param.ds_process_group.size() * each.param.ds_tensor.ds_numel for each in records]
        *begins, numel = accumulate([-(-size // step) * step for size in sizes], initial=0)
        with torch.inference_mode(False):  # memory that can be trained
            memory = torch.empty(numel, dtype=dtype, device=device)
            for record, begin, size in zip(records, begins, sizes, strict=True):
                record.storage, record.rows = self, memory[begin : begin + size]
                record.full = record.rows[: record.param.ds_numel].view(record.param.ds_shape)
        self.records, self._memory, self._nbytes = records, memory.untyped_storage(), memory.nbytes
        del memory
        self.owner: Any = None
        self.inside, self._has_bytes, self._on_host = 0, True, device.type == "cpu"
        self._references = self._count_references()

    def _count_references(self) -> int:
        return torch._C._storage_Use_Count(self._memory._cdata)

    def fill(self, stream: Any) -> None:
        """Give it its bytes, which belong to the current ``stream``."""
        if not self._has_bytes:
            self._memory.resize_(self._nbytes)
            self._has_bytes = True
        self.owner = stream

    def empty(self, returns: bool) -> None:
        """Free its bytes: the values ``returns`` to it. Otherwise other references to it keep the old values."""
        if self._on_host and self._memory.is_shared():  # with other processes, by the program: it keeps its bytes
            if not returns:
                self.leave()
        elif returns or self._count_references() == self._references:
            self._memory.resize_(0)
            self._has_bytes = False
        else:
            self.leave()

    def leave(self) -> None:
        """Let its records, which are all sharded, have another storage the next time."""
        for record in self.records:
            record.storage = record.rows = record.full = None


def memory_of(records: Sequence[Record], stream: Any, gathered: Sequence[Record] = ()) -> list[Any]:
    """Return the memory of the values, flat and padded, for a gather to fill. It belongs to the current ``stream``.

    ``gathered``: all that the gather gathers, if there is more.
    """
    storage: Any = None
    rows: list[Any] = []
    for record in records:  # without calls for each
        if record.storage is None:
            _divide([each for each in gathered or records if each.storage is None])
        if record.storage is not storage:
            storage = record.storage
            if not storage.inside:
                storage.fill(stream)
        if not record.is_in_storage:
            record.is_in_storage = True
            storage.inside += 1
        rows += (record.rows,)
    return rows


def divide_anew(records: Iterable[Record]) -> None:
    """Let ``records`` have other storages from their next gather on, because other ones will be held."""
    for storage in {record.storage for record in records if record.storage is not None}:
        if not storage.inside:
            storage.leave()


def _divide(records: Iterable[Record]) -> None:
    """Make the storages of ``records``, of one gather."""
    shared: dict[Any, list[Record]] = {}
    for record in records:
        param = record.param
        lives = record.hold, param.ds_persist, param.requires_grad, param.ds_tensor.dtype
        shared.setdefault((*record.units, *lives) if len(record.units) == 1 else record, []).append(record)
    for members in shared.values():
        UnitStorage(members)
