"""A ZeRO-3 parameter: the states of its values, the claims that keep them, and its record (E1).

The state is DeepSpeed's own ``ds_status``; there is no copy of it. These are its transitions:

===========  ================  ============================  =====================================
event        ``SHARDED``       ``IN_FLIGHT``                 ``UNSHARDED``
===========  ================  ============================  =====================================
``UNSHARD``  -> ``IN_FLIGHT``  error                         error
``ARRIVE``   error             -> ``UNSHARDED``              error
``CLAIM``    error             stay                          stay
``DROP``     stay              stay                          stay
``RESHARD``  error             error                         -> ``SHARDED``; error under ``MODULE``
``WRITE``    stay              waits: -> ``UNSHARDED``       stay
===========  ================  ============================  =====================================

A claim is a reason to keep the values. An optimizer step, or a context that has written, may reshard in spite of a
claim and leaves the claim set; the values are then unsharded again before the next use. A parameter without a claim has
its *class at rest*, which gathers the values for each reader. A parameter with a claim and its values has its own
class. On a device with streams, it gets its own class when the host sees that the gather is complete; until then, a
reader's stream has to wait (U2).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.engine.torch_internals import internal
from zerosync_strategy.core.engine.types import Zero3Parameter


class State(enum.Enum):
    """Where the values of a parameter are; the value is the name of DeepSpeed's status."""

    SHARDED = "NOT_AVAILABLE"  # each rank has its shard
    IN_FLIGHT = "INFLIGHT"  # and a gather is under way
    UNSHARDED = "AVAILABLE"  # this rank has all values


class Claim(enum.Flag):
    """A reason to keep a parameter's values."""

    MODULE = enum.auto()  # its unit runs, forward or backward, or a graph will need it
    PERSISTENT = enum.auto()  # DeepSpeed shards it only for the step
    CONTEXT = enum.auto()  # a GatheredParameters context of the program
    WINDOW = enum.auto()  # it is held until the optimizer step
    STEPS = enum.auto()  # a step that does not change it has left it unsharded (R4)
    PHASE = enum.auto()  # gathered_for_inference()


class Event(enum.Enum):
    """What happens to a parameter."""

    UNSHARD = "unsharded"
    ARRIVE = "given its values"
    CLAIM = "claimed"
    DROP = "let go"
    RESHARD = "resharded"
    WRITE = "written to"


_SHARDED, _IN_FLIGHT, _UNSHARDED = State
_WAIT, _UNSHARD = "Wait for its gather first.", "Unshard it first."
_TAKE, _USE = "Use the gather that is under way.", "Use the values that are there."
TRANSITIONS: dict[Event, dict[State, State | str]] = {  # a string: an error with this remedy
    Event.UNSHARD: {_SHARDED: _IN_FLIGHT, _IN_FLIGHT: _TAKE, _UNSHARDED: _USE},
    Event.ARRIVE: {_SHARDED: _UNSHARD, _IN_FLIGHT: _UNSHARDED, _UNSHARDED: "Each gather ends once."},
    Event.CLAIM: {_SHARDED: _UNSHARD, _IN_FLIGHT: _IN_FLIGHT, _UNSHARDED: _UNSHARDED},
    Event.DROP: {_SHARDED: _SHARDED, _IN_FLIGHT: _IN_FLIGHT, _UNSHARDED: _UNSHARDED},
    Event.RESHARD: {_SHARDED: "Only its values can be.", _IN_FLIGHT: _WAIT, _UNSHARDED: _SHARDED},
    Event.WRITE: {_SHARDED: _SHARDED, _IN_FLIGHT: _UNSHARDED, _UNSHARDED: _UNSHARDED},
}
# For the hot paths, because enum is slow: bits of claims, and the names of DeepSpeed's statuses.
MODULE, _PERSISTENT, CONTEXT, WINDOW, STEPS, PHASE = (claim.value for claim in Claim)
SHARDED, IN_FLIGHT, UNSHARDED = (state.value for state in State)


HELD = WINDOW | PHASE
_BRIEF = MODULE | CONTEXT
STATUSES: dict[str, Any] = {}  # DeepSpeed's statuses, by name


class Gather(Protocol):
    """A gather that was issued (``params/issuing.py``)."""

    is_done: bool
    event: torch.Event | None
    users: list[Any]

    @property
    def is_complete(self) -> bool: ...

    def wait(self) -> None: ...

    def join(self) -> None: ...


class Unit(Protocol):
    """A module whose parameters are gathered together (``params/units.py``)."""

    claims: set[str | int]
    running: int


class _Modules(set[int]):
    """DeepSpeed's set of modules that use a parameter, for engines that are not attached."""

    def __init__(self, record: Record) -> None:
        super().__init__(record.param.ds_active_sub_modules)
        self.record = record

    def add(self, module: int) -> None:
        set.add(self, module)
        self.record.param.__class__ = self.record.own_class

    def discard(self, module: object) -> None:
        set.discard(self, module)
        self.record.settle()

    def clear(self) -> None:
        set.clear(self)
        self.record.settle()


class Record:
    """What ZeroSync knows about one parameter. It is the parameter's attribute ``_zerosync_record``.

    Attributes:
        owner: the scheduler: ``streams`` notes writes of the shards, ``arrive(param)`` waits for a gather, and
            ``issuing.unsharded`` counts bytes.
        group: of the ranks that shard it; has its ``index`` in the order of gathers.
        order: its place in the order of gathers (U1).
        bits: the claims that are set here; :attr:`claims` has all.
        gather: the last gather that was issued (``params/issuing.py``); ``None``: none yet.
        writes: how often steps, checkpoints and programs have written the shards: alike on all ranks.
        writes_found: how often this rank has found that a module had written to the gathered values.
        flags: by stream, flags on the device of such writes, which the host has not read yet.
        watched: the values are compared with the shards before each reshard.
        plain: its shard has plain values, in memory and once: it is neither quantized, on NVMe, nor of hpZ.
        gathers: how often it was gathered for modules, for a step, since the last step.
        hold: keep it from its first use in a window to the step.
        units: the units that it belongs to. While one of them has a claim, it has the claim ``MODULE``. Parameters of
            one unit alone share a storage.
        storage: of its values; ``None`` before the first gather.
        rows, full: its part of the storage: flat with padding, and in its shape without.
        is_in_storage: the parameter is unsharded there, or about to be, and no context has put it elsewhere.
        in_shards: what was written to the gathered values is in the shards already.
        nbytes: of the values; 0 if DeepSpeed keeps it gathered. ``counted``: the bytes that are counted as unsharded.
        values: handles what a program does with the parameter at rest (``params/values.py``); ``None``: nothing does.
        own_class, class_at_rest: the classes of the parameter; equal without ``values``.
        placeholders: stand for it in graphs, by whether they need a gradient.
        changes: knows whether its engine has reduced and dropped gradients; ``None``: it never has.
    """

    def __init__(self, param: Zero3Parameter, name: str, owner: Any, group: Any) -> None:
        self.param, self.name, self.owner, self.group = param, name, owner, group
        self.order: tuple[int, int] = group.index, param.ds_id
        self.bits = self.writes = self.writes_found = self.gathers = 0
        self.gather: Gather | None = None
        self.flags: dict[torch.Stream | None, torch.Tensor] = {}
        self.watched = self.hold = False
        self.plain = zero3.has_plain_shard(param)
        self.units: tuple[Unit, ...] = ()
        self.storage: Any = None  # a UnitStorage
        self.rows: Any = None
        self.full: Any = None
        self.counted = 0
        self.is_in_storage = self.in_shards = False
        self.nbytes = 0 if param.ds_persist else zero3.full_bytes(param)
        self.empty = param.data.new_empty(0)
        self.gone: tuple[int, int] | None = None  # version and writes when the values were freed
        self.values: Any = None
        self.own_class = self.class_at_rest = type(param)
        self.version = self.writes_at_use = -1  # version when values and shards were equal; writes when modules began
        self.placeholders: dict[bool, torch.Tensor] = {}
        self.changes: Any = None
        if not STATUSES:
            STATUSES.update((status.name, status) for status in type(param.ds_status))
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
        return bool(self.bits & HELD)

    @property
    def stays(self) -> bool:
        """Whether the values stay between modules: they are persistent or held."""
        return bool(self.param.ds_persist or self.bits & HELD)

    # ---- transitions ---------------------------------------------------------------------------------------------

    def illegal(self, event: Event, remedy: str = "") -> RuntimeError:
        remedy = remedy or str(TRANSITIONS[event][self.state])
        return RuntimeError(
            f"Parameter {self.name}, {self.state.name} with {self.claims}, was to be {event.value}. {remedy}"
        )

    def write(self) -> None:
        """Record that the current stream is about to write the shards, or has just done so."""
        if self.state is State.IN_FLIGHT:
            self.owner.arrive(self.param)  # it would deliver the values before the write
        self.writes += 1
        self.owner.streams.record_write()

    # ---- the class -----------------------------------------------------------------------------------------------

    def intercept(self, values: Any, class_at_rest: type) -> None:
        """Give operations on the parameter at rest to ``values``, and watch for writes to the gathered values."""
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
        """Set the own class until :meth:`settle`; the current stream has waited for the values."""
        self.param.__class__ = self.own_class

    # ---- changes of the gathered values --------------------------------------------------------------------------

    @internal
    def carry_changes(self) -> None:
        """Before the gathered values are freed, copy what was written to them to the shards."""
        if self.values is not None and (self.watched or self.version != self.param._version or self.stays):
            self.values.resharding(self)

    def forget_changes(self) -> None:
        """Treat the gathered values as unchanged: the shards have the same, or newer ones."""
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
        pair = zero3.shard_pair(param)
        if pair is None:
            return param.new_zeros((), dtype=torch.bool)
        shard, part = pair
        return shard.to(part.device, non_blocking=True).ne(part).any()


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


def record_of(param: Zero3Parameter) -> Record:
    return param._zerosync_record


def is_in_use(param: Zero3Parameter) -> bool:
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
            record.bits & HELD
            or param.ds_persist
            or param.ds_active_sub_modules
            or (record.bits & _BRIEF and not torch.is_grad_enabled())
            or any([unit.running for unit in record.units])
        )
    )


def is_at_rest(param: Zero3Parameter) -> bool:
    """Return whether operations on ``param`` are intercepted; true also until the host sees its gather complete."""
    record = getattr(param, "_zerosync_record", None)
    return record is not None and param.__class__ is not record.own_class
