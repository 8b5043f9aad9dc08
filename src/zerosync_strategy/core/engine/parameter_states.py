"""The states of a ZeRO-3 parameter, the events that change them, and the claims that keep its values (E1).

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
