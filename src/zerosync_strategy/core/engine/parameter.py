"""The record of a ZeRO-3 parameter: the state of its values, their claims, and how often its shards were written (E1).

Between a forward and its backward, the storage of the values (``storage.py``) stays the same but has no bytes. Reading
what autograd has saved of them in between raises torch's own error of a modified tensor, because the version of the
parameter differs then. The idea is that of PyTorch's FSDP, except for the version.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.engine.parameter_states import (
    CONTEXT,
    IN_FLIGHT,
    MODULE,
    PHASE,
    SHARDED,
    TRANSITIONS,
    UNSHARDED,
    WINDOW,
    Claim,
    Event,
    State,
)
from zerosync_strategy.core.engine.torch_internals import internal

_HELD = WINDOW | PHASE
_BRIEF = MODULE | CONTEXT
_statuses: dict[str, Any] = {}  # DeepSpeed's statuses, by name


class _Modules(set[Any]):
    """DeepSpeed's set of modules that use a parameter, for engines that are not attached."""

    def __init__(self, record: Record) -> None:
        super().__init__(record.param.ds_active_sub_modules)
        self.record = record

    def add(self, module: Any) -> None:
        set.add(self, module)
        self.record.param.__class__ = self.record.own_class

    def discard(self, module: Any) -> None:
        set.discard(self, module)
        self.record.settle()

    def clear(self) -> None:
        set.clear(self)
        self.record.settle()


class Record:
    """What ZeroSync knows about one parameter. It is the parameter's attribute ``_zerosync_record``.

    Attributes:
        owner: the scheduler: ``shards_written()`` is called when the current stream writes the shards,
            ``arrive(param)`` waits for a gather in flight, and ``issuing.unsharded`` counts bytes.
        group: of the ranks that shard it; has its ``place`` in the order of gathers.
        order: its place in the order of gathers (U1).
        bits: the claims that are set here; :attr:`claims` has all.
        gather: the last gather that was issued (``comm/collectives.py``); ``None``: none yet.
        writes: how often steps, checkpoints and programs have written the shards: alike on all ranks.
        found: how often this rank has found that a module had written to the gathered values.
        unseen: by stream, flags on the device of such writes, which the host has not read yet.
        watched: the values are compared with the shards before each reshard.
        plain: gathered from one shard of its values: neither quantized, on disk, nor of hpZ.
        gathers: how often it was gathered for modules, for a step, since the last step.
        hold: keep it from its first use in a window to the step.
        units: that have it; their claims are its claim ``MODULE``. The parameters of one unit alone share a storage.
        storage: of its values; ``None`` before the first gather. ``rows``: its part of it, flat, with padding.
        full: that part without padding, in the shape of the parameter.
        is_in_storage: the parameter is unsharded there, or about to be, and no context has put it elsewhere.
        in_shards: its shards have what was written to its values.
        nbytes: of the values; 0 if DeepSpeed keeps it gathered. ``counted``: the bytes that are counted as unsharded.
        values: handles what a program does with the parameter at rest (``params/values.py``); ``None``: nothing does.
        own_class, class_at_rest: the classes of the parameter; equal without ``values``.
        placeholders: stand for it in graphs, by whether they need a gradient.
        changes: knows whether gradients of its engine have gone (``misused_gradients.py``); ``None``: none ever has.
    """

    def __init__(self, param: Any, name: str, owner: Any, group: Any) -> None:
        self.param, self.name, self.owner, self.group = param, name, owner, group
        self.order: tuple[int, int] = group.place, param.ds_id
        self.bits = self.writes = self.found = self.gathers = 0
        self.gather: Any = None
        self.unseen: dict[Any, torch.Tensor] = {}
        self.watched = self.hold = False
        self.plain = zero3.has_plain_shard(param)
        self.units: tuple[Any, ...] = ()
        self.storage: Any = None  # a UnitStorage
        self.rows: Any = None
        self.full: Any = None
        self.counted = 0
        self.is_in_storage = self.in_shards = False
        self.nbytes = 0 if param.ds_persist else zero3.full_bytes(param)
        self.none = param.data.new_empty(0)
        self._gone: tuple[int, int] | None = None  # version and writes when the values were freed
        self.values: Any = None
        self.own_class = self.class_at_rest = type(param)
        self.version = self.writes_at_use = -1  # version when values and shards were equal; writes when modules began
        self.placeholders: dict[bool, torch.Tensor] = {}
        self.changes: Any = None
        if not _statuses:
            _statuses.update((status.name, status) for status in type(param.ds_status))
        param._zerosync_record = self

    @property
    def state(self) -> State:
        return State(self.param.ds_status._name_)

    @property
    def claims(self) -> Claim:
        claims = Claim(self.bits | (MODULE if self.param.ds_active_sub_modules else 0))
        return claims | Claim.PERSISTENT if self.param.ds_persist else claims

    @property
    def held(self) -> bool:
        """Whether the values stay until the step, or the end of a phase."""
        return bool(self.bits & _HELD)

    @property
    def stays(self) -> bool:
        """Whether the values stay between modules: they are persistent or held."""
        return bool(self.param.ds_persist or self.bits & _HELD)

    # ---- transitions ---------------------------------------------------------------------------------------------

    def _illegal(self, event: Event, remedy: str = "") -> RuntimeError:
        remedy = remedy or str(TRANSITIONS[event][self.state])
        return RuntimeError(
            f"Parameter {self.name}, {self.state.name} with {self.claims}, was to be {event.value}. {remedy}"
        )

    def write(self) -> None:
        """Record that the current stream is about to write the shards, or has just done so."""
        if self.state is State.IN_FLIGHT:
            self.owner.arrive(self.param)  # it would deliver the values before the write
        self.writes += 1
        self.owner.shards_written()

    # ---- the class -----------------------------------------------------------------------------------------------

    def intercept(self, values: Any, class_at_rest: type) -> None:
        """Let ``values`` handle what is done with the parameter at rest, and watch for writes to gathered values."""
        self.values, self.class_at_rest = values, class_at_rest
        self.version, self.watched = self.param._version, True
        self.param.ds_active_sub_modules = _Modules(self)
        self.settle()

    def leave(self) -> None:
        """Undo :meth:`intercept`."""
        self.values, self.class_at_rest, self.watched = None, self.own_class, False
        self.param.ds_active_sub_modules = set(self.param.ds_active_sub_modules)
        self.param.__class__ = self.own_class

    def settle(self) -> None:
        settle((self,))

    def use(self) -> None:
        """Give code the own class until :meth:`settle`; the current stream has waited for the values."""
        self.param.__class__ = self.own_class

    # ---- changes of the gathered values --------------------------------------------------------------------------

    @internal
    def carry_changes(self) -> None:
        """Before the values are freed, let ``values`` carry writes to them over to the shards."""
        if self.values is not None and (self.watched or self.version != self.param._version or self.stays):
            self.values.resharding(self)

    def forget_changes(self) -> None:
        """Treat the values as unchanged: the shards have what was written to them, or are newer."""
        self.version = self.param._version

    def changed(self) -> bool | torch.Tensor:
        """Return whether modules have written to the values since these were equal to the shards; reset the answer.

        Writes through ``.data`` change only the values, so they are found only if those are watched. Each rank compares
        its own part, so the answer differs between ranks. It is a tensor, so that the host need not wait for it.
        """
        param, version = self.param, self.version
        self.forget_changes()
        if param._version != version:
            return True
        if not self.watched or self.writes_at_use != self.writes or not self.plain:
            return False  # not detectable, or the shards are newer
        if zero3.gather_dtype(param) is not param.ds_tensor.dtype:
            return False  # the values are not equal to the shards to the bit
        if param.shape != param.ds_shape:
            return True
        pair = zero3.own_part(param)
        if pair is None:
            return param.new_zeros((), dtype=torch.bool)
        shard, part = pair
        return shard.to(part.device, non_blocking=True).ne(part).any()


# ---- transitions of several records, in as few calls as for one --------------------------------------------------


def unshard(records: Iterable[Record]) -> None:
    """Begin the gathers."""
    in_flight = _statuses[IN_FLIGHT]
    for record in records:
        param = record.param
        if param.ds_status._name_ != SHARDED:
            raise record._illegal(Event.UNSHARD)
        param.ds_status = in_flight


def arrive(records: Collection[Record], values: Sequence[torch.Tensor] | None = None) -> bool:
    """End the gathers, which have filled the storages, or else ``values``: the memory of each from now on.

    Return whether one has a claim, so that it may need another class (:func:`settle`).
    """
    unsharded, has_claims = _statuses[UNSHARDED], False
    for place, record in enumerate(records):
        param = record.param
        if param.ds_status._name_ != IN_FLIGHT:
            raise record._illegal(Event.ARRIVE)
        param.ds_status = unsharded
        param.data = record.full if values is None else values[place]
        if record.bits or param.ds_persist:
            has_claims = True
    returned(records)
    return has_claims


def reshard(records: Collection[Record], returns: bool) -> None:
    """Free the values, after what was written to them has gone to the shards, in :func:`~zero3.as_it_is`.

    For ``returns`` see :func:`free`.
    """
    for record in records:
        param, bits = record.param, record.bits
        if bits & MODULE:
            raise record._illegal(Event.RESHARD, "A module uses it: reshard it when that has ended.")
        if param.ds_status._name_ != UNSHARDED:
            raise record._illegal(Event.RESHARD)
        if record.in_shards:
            record.version = param._version
        elif record.watched or record.version != param._version or param.ds_persist or bits & _HELD:
            record.carry_changes()
    sharded = _statuses[SHARDED]
    for record in records:
        record.param.ds_status = sharded
    free(records, returns)
    for record in records:
        record.param.__class__ = record.class_at_rest


def settle(records: Iterable[Record]) -> None:
    """Give the parameters the classes that fit their states and claims."""
    for record in records:
        param, gather = record.param, record.gather
        if record.bits & MODULE or param.ds_active_sub_modules:
            continue  # its first user has set the own class
        is_there = (record.bits or param.ds_persist) and param.ds_status._name_ == "AVAILABLE"
        # The stream that entered a context has waited; ordering other streams is up to the program.
        is_complete = gather is None or gather.event is None or record.bits & CONTEXT or gather.is_complete
        param.__class__ = record.own_class if is_there and is_complete else record.class_at_rest


def claim_for_unit(records: Iterable[Record]) -> None:
    """Claim ``records`` by ``MODULE``. The current stream has waited for the values."""
    for record in records:
        if record.param.ds_status._name_ == SHARDED:
            raise record._illegal(Event.CLAIM)
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
            raise record._illegal(Event.CLAIM)
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


def returned(records: Collection[Record]) -> None:
    """Restore the versions of unsharded parameters: autograd accepts saved ones unless shards were written."""
    params: list[Any] = [*records]
    versions: list[Any] = [*records]  # no call for each: this runs for each parameter of each gather
    count = 0
    for record in records:
        if record._gone is not None:
            version, writes = record._gone
            record._gone, record.version = None, version + record.writes - writes
            params[count], versions[count] = record.param, record.version
            count += 1
    torch._C._autograd._unsafe_set_version_counter(tuple(params[:count]), tuple(versions[:count]))


def free(records: Collection[Record], returns: bool) -> None:
    """Free the values of parameters that have been resharded; for ``returns`` see ``UnitStorage.empty()``."""
    params: list[Any] = [*records]
    versions: list[Any] = [*records]
    count = freed = 0
    for record in records:
        if record._gone is None:
            record._gone = record.param._version, record.writes
            params[count], versions[count] = record.param, record._gone[0] + 1
            count += 1
    torch._C._autograd._unsafe_set_version_counter(tuple(params[:count]), tuple(versions[:count]))
    for record in records:
        record.param.data = record.none
        freed += record.counted
        record.counted = 0
        if record.is_in_storage:
            record.is_in_storage, storage = False, record.storage
            storage.inside -= 1
            if not storage.inside:
                storage.empty(returns)
    if freed:
        for record in records:
            record.owner.issuing.unsharded.add(-freed)
            break


def record_of(param: Any) -> Record:
    return param._zerosync_record


def is_in_use(param: Any) -> bool:
    """Return whether ``param`` has its values and keeps them for a reader's backward.

    True for held and persistent parameters, and for a unit's parameters while its forward runs. Without gradients, no
    backward follows, so it is also true for parameters that a unit claims for a backward, and in a
    ``GatheredParameters`` context. Other unsharded parameters were gathered ahead or not yet resharded, and may be gone
    by the backward.
    """
    try:
        record, status = param._zerosync_record, param.ds_status
    except AttributeError:
        return True
    return bool(
        status._name_ == "AVAILABLE"
        and (
            record.bits & _HELD
            or param.ds_persist
            or param.ds_active_sub_modules
            or (record.bits & _BRIEF and not torch.is_grad_enabled())
            or any([unit.runs for unit in record.units])
        )
    )


def is_at_rest(param: Any) -> bool:
    """Return whether operations on ``param`` are intercepted; true also until the host sees its gather complete."""
    record = getattr(param, "_zerosync_record", None)
    return record is not None and param.__class__ is not record.own_class
