"""Transitions of several ZeRO-3 parameters, in as few calls as for one, and the storage of a unit's values.

In a storage, each parameter is contiguous, with the shard of each rank as one row, so a backend can gather in place.
Parameters that share a storage are unsharded and resharded together. What only some of a unit's parameters do, such as
being held, gives them a storage of their own. A parameter of several units has its own, too.

Between a forward and its backward, the storage of the values stays the same but has no bytes. Reading what autograd has
saved of them in between raises torch's own error of a modified tensor, because the version of the parameter differs
then. The idea is that of PyTorch's FSDP, except for the version.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch

from zerosync_strategy.core.engine.parameter import (
    HELD,
    IN_FLIGHT,
    MODULE,
    SHARDED,
    STATUSES,
    UNSHARDED,
    Event,
    Record,
    settle,
)


def unshard(records: Iterable[Record]) -> None:
    """Mark ``records`` as in flight: their gathers have been issued."""
    in_flight = STATUSES[IN_FLIGHT]
    for record in records:
        param = record.param
        if param.ds_status._name_ != SHARDED:
            raise record.illegal(Event.UNSHARD)
        param.ds_status = in_flight


def arrive(records: Collection[Record], values: Sequence[torch.Tensor] | None = None) -> bool:
    """Set the parameters to their values: in their storages, or else ``values``, one tensor for each.

    Return whether one has a claim, so that :func:`settle` may have to change its class.
    """
    unsharded, has_claims = STATUSES[UNSHARDED], False
    for place, record in enumerate(records):
        param = record.param
        if param.ds_status._name_ != IN_FLIGHT:
            raise record.illegal(Event.ARRIVE)
        param.ds_status = unsharded
        param.data = record.full if values is None else values[place]
        if record.bits or param.ds_persist:
            has_claims = True
    restore_versions(records)
    return has_claims


def reshard(records: Collection[Record], keeps_storage: bool) -> None:
    """Copy what was written to the values to the shards, then free them. Call it in :func:`~zero3.as_it_is`.

    For ``keeps_storage`` see :func:`free`.
    """
    for record in records:
        param, bits = record.param, record.bits
        if bits & MODULE:
            raise record.illegal(Event.RESHARD, "A module uses it: reshard it when that has ended.")
        if param.ds_status._name_ != UNSHARDED:
            raise record.illegal(Event.RESHARD)
        if record.in_shards:
            record.version = param._version
        elif record.watched or record.version != param._version or param.ds_persist or bits & HELD:
            record.carry_changes()
    sharded = STATUSES[SHARDED]
    for record in records:
        record.param.ds_status = sharded
    free(records, keeps_storage)
    for record in records:
        record.param.__class__ = record.class_at_rest


def claim_for_unit(records: Iterable[Record]) -> None:
    """Claim ``records`` by ``MODULE``. The current stream has waited for the values."""
    for record in records:
        if record.param.ds_status._name_ == SHARDED:
            raise record.illegal(Event.CLAIM)
        if record.watched and not record.bits & MODULE:
            record.writes_at_use = record.writes
        record.bits |= MODULE
        record.param.__class__ = record.own_class


def drop_for_unit(records: Iterable[Record]) -> list[Record]:
    """End the claim ``MODULE`` of those of ``records`` whose units have no claims; return these."""
    free: list[Record] = []
    for record in records:
        for unit in record.units:
            if unit.claims:
                break
        else:
            record.bits &= ~MODULE
            free += (record,)
    return free


def claim(records: Collection[Record], claims: int) -> None:
    """Keep the values of ``records``, unsharded or in flight, for ``claims``, as bits."""
    for record in records:
        if record.param.ds_status._name_ == SHARDED:
            raise record.illegal(Event.CLAIM)
        record.bits |= claims
    settle(records)


def drop(records: Collection[Record], claims: int) -> None:
    """End ``claims``, as bits."""
    for record in records:
        record.bits &= ~claims
    settle(records)


def sort_out(records: Iterable[Record]) -> tuple[list[Record], list[Record], list[Record], bool]:
    """Return those of ``records`` that are unsharded and to be held, those without a claim that are unsharded, or in
    flight, and whether others have a claim.
    """
    held: list[Record] = []
    free: list[Record] = []
    in_flight: list[Record] = []
    has_others = False
    for record in records:
        param, status = record.param, record.param.ds_status._name_
        if record.hold and status == UNSHARDED:
            held += (record,)
        elif record.bits or param.ds_persist or param.ds_active_sub_modules:
            has_others = True
        elif status == UNSHARDED:
            free += (record,)
        elif status == IN_FLIGHT:
            in_flight += (record,)
    return held, free, in_flight, has_others


def restore_versions(records: Collection[Record]) -> None:
    """Restore the versions of unsharded parameters: autograd accepts saved ones unless shards were written."""
    params: list[Any] = [*records]
    versions: list[Any] = [*records]  # no call for each: this runs for each parameter of each gather
    count = 0
    for record in records:
        if record.gone is not None:
            version, writes = record.gone
            record.gone, record.version = None, version + record.writes - writes
            params[count], versions[count] = record.param, record.version
            count += 1
    torch._C._autograd._unsafe_set_version_counter(tuple(params[:count]), tuple(versions[:count]))


def free(records: Collection[Record], keeps_storage: bool) -> None:
    """Free the values of parameters that have been resharded; for ``keeps_storage`` see ``UnitStorage.empty()``."""
    params: list[Any] = [*records]
    versions: list[Any] = [*records]
    count = freed = 0
    for record in records:
        if record.gone is None:
            record.gone = record.param._version, record.writes
            params[count], versions[count] = record.param, record.gone[0] + 1
            count += 1
    torch._C._autograd._unsafe_set_version_counter(tuple(params[:count]), tuple(versions[:count]))
    for record in records:
        record.param.data = record.empty
        freed += record.counted
        record.counted = 0
        if record.is_in_storage:
            record.is_in_storage, storage = False, record.storage
            storage.inside -= 1
            if not storage.inside:
                storage.empty(keeps_storage)
    if freed:
        for record in records:
            record.owner.issuing.unsharded.add(-freed)
            break


# ---- storage ---------------------------------------------------------------------------------------------------------


ALIGNMENT = 256
"""Bytes: each parameter begins at a multiple of them, as if it had been allocated alone on a GPU (at least 512)."""


class UnitStorage:
    """The storage of the values of ``records``. It is as large as all of them, or of no bytes if all are sharded.

    It stays the same between a forward and its backward, so what autograd has saved of a parameter, itself or a view,
    has its values again once they are unsharded.

    Attributes:
        owner: the stream that has allocated its bytes; ``None`` on a device without streams.
        memory, nbytes, has_bytes: the storage itself, the bytes of all values, and whether it has them.
        inside: how many of ``records`` have their values in it, or will once a gather has arrived.
    """

    __slots__ = ("_on_host", "_references", "has_bytes", "inside", "memory", "nbytes", "owner", "records")

    def __init__(self, records: Sequence[Record]) -> None:
        dtype, device = records[0].param.ds_tensor.dtype, records[0].empty.device
        step = max(1, ALIGNMENT // dtype.itemsize)
        sizes = [each.param.ds_process_group.size() * each.param.ds_tensor.ds_numel for each in records]
        *begins, numel = accumulate([-(-size // step) * step for size in sizes], initial=0)
        with torch.inference_mode(False):  # memory that can be trained
            memory = torch.empty(numel, dtype=dtype, device=device)
            for record, begin, size in zip(records, begins, sizes, strict=True):
                record.storage, record.rows = self, memory[begin : begin + size]
                record.full = record.rows[: record.param.ds_numel].view(record.param.ds_shape)
        self.records, self.memory, self.nbytes = records, memory.untyped_storage(), memory.nbytes
        del memory
        self.owner: torch.Stream | None = None
        self.inside, self.has_bytes, self._on_host = 0, True, device.type == "cpu"
        self._references = self._count_references()

    def _count_references(self) -> int:
        return torch._C._storage_Use_Count(self.memory._cdata)

    def empty(self, keeps_storage: bool) -> None:
        """Free its bytes. ``keeps_storage``: values come back to it; else other references to it keep the old ones."""
        if self._on_host and self.memory.is_shared():  # with other processes, by the program: it keeps its bytes
            if not keeps_storage:
                self.leave()
        elif keeps_storage or self._count_references() == self._references:
            self.memory.resize_(0)
            self.has_bytes = False
        else:
            self.leave()

    def leave(self) -> None:
        """Separate it from its records, all sharded: their next gather makes another storage."""
        for record in self.records:
            record.storage = record.rows = record.full = None


def memory_of(
    records: Sequence[Record], stream: torch.Stream | None, gathered: Sequence[Record] = ()
) -> list[torch.Tensor]:
    """Return the memory of the values, flat and padded, for a gather to fill. It belongs to the current ``stream``.

    ``gathered``: all records of the gather, if ``records`` are only some of them.
    """
    storage: Any = None
    rows: list[torch.Tensor] = []
    for record in records:  # without calls for each
        if record.storage is None:
            _divide([each for each in gathered or records if each.storage is None])
        if record.storage is not storage:
            storage = record.storage
            if not storage.inside:
                if not storage.has_bytes:
                    storage.memory.resize_(storage.nbytes)
                    storage.has_bytes = True
                storage.owner = stream
        if not record.is_in_storage:
            record.is_in_storage = True
            storage.inside += 1
        rows += (record.rows,)
    return rows


def divide_anew(records: Iterable[Record]) -> None:
    """Drop the empty storages of ``records``: other parameters will be held, so the next gather divides them anew."""
    for storage in {record.storage for record in records if record.storage is not None}:
        if not storage.inside:
            storage.leave()


def _divide(records: Iterable[Record]) -> None:
    """Make storages for ``records``, which one gather brings."""
    shared: dict[object, list[Record]] = {}
    for record in records:
        param = record.param
        lives = record.hold, param.ds_persist, param.requires_grad, param.ds_tensor.dtype
        shared.setdefault((*record.units, *lives) if len(record.units) == 1 else record, []).append(record)
    for members in shared.values():
        UnitStorage(members)
