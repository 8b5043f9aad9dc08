"""E1: the record of a ZeRO-3 parameter; every row of its table, legal or not."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from zerosync_strategy.core.engine.parameter import TRANSITIONS, Claim, Event, Record, State, is_in_use, record_of
from zerosync_strategy.core.engine.transitions import arrive, claim, drop, reshard, unshard


class Owner:
    """What schedules gathers: ends those that are under way, and hears of writes."""

    def __init__(self) -> None:
        self.writes, self.streams = 0, self

    def record_write(self) -> None:
        self.writes += 1

    def arrive(self, param: Any) -> None:
        arrive((record_of(param),), (torch.ones(4),))


class Values:
    """What is told before gathered values go that may have been changed."""

    def __init__(self) -> None:
        self.told: list[bool | torch.Tensor] = []

    def resharding(self, record: Record) -> None:
        self.told.append(record.changed())


class AtRest(torch.nn.Parameter):
    pass


def record_in(state: State) -> Record:
    """The record of a parameter as DeepSpeed's partitioning leaves one, brought into ``state``."""
    param: Any = torch.nn.Parameter(torch.empty(0))
    shard: Any = torch.zeros(4)
    shard.final_location, shard.ds_numel = None, 4
    param.ds_status, param.ds_tensor = ZeroParamStatus.NOT_AVAILABLE, shard
    param.ds_id, param.ds_persist, param.ds_active_sub_modules = 0, False, set()
    param.ds_numel, param.ds_shape = 4, torch.Size([4])
    record = Record(param, "'weight'", Owner(), SimpleNamespace(index=0))
    if state is not State.SHARDED:
        unshard((record,))
    if state is State.UNSHARDED:
        arrive((record,), (torch.zeros(4),))
    assert record.state is state
    return record


def happens(event: Event, record: Record) -> None:
    {
        Event.UNSHARD: lambda: unshard((record,)),
        Event.ARRIVE: lambda: arrive((record,), (torch.ones(4),)),
        Event.CLAIM: lambda: claim((record,), Claim.WINDOW.value),
        Event.DROP: lambda: drop((record,), Claim.WINDOW.value),
        Event.RESHARD: lambda: reshard((record,), keeps_storage=False),
        Event.WRITE: record.write,
    }[event]()


ROWS = [(event, state) for event in Event for state in State]


def test_the_table_has_every_row() -> None:
    assert [(event, state) for event, rows in TRANSITIONS.items() for state in rows] == ROWS


@pytest.mark.parametrize(("event", "state"), ROWS)
def test_a_row_of_the_table(event: Event, state: State) -> None:
    record, row = record_in(state), TRANSITIONS[event][state]
    if isinstance(row, State):
        happens(event, record)
        assert record.state is row
    else:
        with pytest.raises(RuntimeError) as raised:
            happens(event, record)
        assert str(raised.value) == f"Parameter 'weight', {state.name} with {Claim(0)}, was to be {event.value}. {row}"
        assert record.state is state and record.writes == 0


def test_a_parameter_that_a_module_uses_is_not_resharded() -> None:
    record = record_in(State.UNSHARDED)
    record.intercept(Values(), AtRest)
    record.watched = False
    record.bits = Claim.MODULE.value
    with pytest.raises(RuntimeError, match=r"Parameter 'weight', UNSHARDED with Claim\.MODULE, was to be resharded"):
        reshard((record,), keeps_storage=False)
    record.bits = 0
    reshard((record,), keeps_storage=False)
    assert record.state is State.SHARDED and record.param.numel() == 0


def test_claims() -> None:
    record = record_in(State.UNSHARDED)
    claim((record,), Claim.WINDOW.value)
    claim((record,), Claim.CONTEXT.value)
    record.param.ds_persist = True
    record.param.ds_active_sub_modules.add(1)
    assert record.claims == Claim.WINDOW | Claim.CONTEXT | Claim.PERSISTENT | Claim.MODULE
    assert record.held and record.stays
    drop((record,), Claim.WINDOW.value)
    assert record.claims == Claim.CONTEXT | Claim.PERSISTENT | Claim.MODULE
    assert not record.held and record.stays


@pytest.mark.parametrize("reason", [Claim.WINDOW, Claim.PHASE, Claim.CONTEXT, Claim.STEPS])
def test_the_class_follows_from_state_and_claims(reason: Claim) -> None:
    record = record_in(State.SHARDED)
    record.intercept(Values(), AtRest)
    classes = [type(record.param)]
    unshard((record,))
    claim((record,), reason.value)
    classes.append(type(record.param))
    arrive((record,), (torch.zeros(4),))
    record.settle()
    classes.append(type(record.param))
    drop((record,), reason.value)
    classes.append(type(record.param))
    assert classes == [AtRest, AtRest, torch.nn.Parameter, AtRest]


def test_a_module_and_persistence_give_a_parameter_its_own_class() -> None:
    record = record_in(State.UNSHARDED)
    record.intercept(Values(), AtRest)
    users = record.param.ds_active_sub_modules
    classes = []
    for change in (lambda: users.add(1), lambda: users.add(2), lambda: users.discard(1), users.clear):
        change()
        classes.append(type(record.param))
    record.param.ds_persist = True
    record.settle()
    classes.append(type(record.param))
    record.leave()
    own = torch.nn.Parameter
    assert [*classes, type(record.param)] == [own, own, own, AtRest, own, own]
    assert type(record.param.ds_active_sub_modules) is set


@pytest.mark.parametrize(
    ("reason", "with_gradients", "in_use"),
    [
        (Claim.WINDOW, True, True), (Claim.PHASE, True, True), (Claim.STEPS, True, False),
        (Claim.CONTEXT, True, False), (Claim.CONTEXT, False, True), (Claim(0), False, False),
    ],
)  # fmt: skip
def test_what_keeps_values_for_a_backward(reason: Claim, with_gradients: bool, in_use: bool) -> None:
    record = record_in(State.UNSHARDED)
    if reason:
        claim((record,), reason.value)
    with torch.set_grad_enabled(with_gradients):
        assert is_in_use(record.param) == in_use
        reshard((record,), keeps_storage=False)
        assert not is_in_use(record.param)


def test_writes_are_counted_and_told() -> None:
    record = record_in(State.SHARDED)
    record.write()
    record.write()
    assert (record.writes, record.owner.writes) == (2, 2)


def test_whoever_gathered_before_a_write_has_not_changed_the_values() -> None:
    """What a module writes is found by torch's count of writes; what the shards have since is newer."""
    record, values = record_in(State.UNSHARDED), Values()
    record.intercept(values, AtRest)
    with torch.no_grad():
        record.param.mul_(2)
    reshard((record,), keeps_storage=False)
    assert values.told == [True]
    unshard((record,))
    arrive((record,), (torch.zeros(4),))
    record.forget_changes()
    record.param.ds_active_sub_modules.add(1)
    record.write()
    record.param.ds_active_sub_modules.discard(1)
    reshard((record,), keeps_storage=False)
    assert values.told == [True, False]
