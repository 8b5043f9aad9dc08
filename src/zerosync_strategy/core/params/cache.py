"""ZeRO-3: how units use parameters that are unsharded once per window and held until the step (``held.py``).

Without this, a unit is gathered for each forward and backward, though its values change only in the optimizer step. A
held parameter stays unsharded until the step reshards it.

Held parameters are gathered in *chunks*: parameters of one process group, in the order in which they were built. Each
unit waits for its own chunks (U2). If all parameters of the model are held, the first unit that needs one in a window
issues all gathers; later units do not communicate, and ranks may run different modules (W6). Else a unit issues its own
chunks and the next ones, in the order of U1.

A ``GatheredParameters`` context that writes, or a checkpoint, may reshard a held parameter. The unit's hooks check for
that before and after its forward, and the start of a backward checks all parameters that the backward may need.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.engine.parameter import PHASE, SHARDED, STEPS, UNSHARDED, WINDOW, Record, settle
from zerosync_strategy.core.engine.patches import replaced
from zerosync_strategy.core.engine.torch_internals import internal
from zerosync_strategy.core.engine.transitions import claim, divide_anew, drop, reshard, sort_out
from zerosync_strategy.core.engine.types import Zero3Parameter
from zerosync_strategy.core.params.held import HoldPlan
from zerosync_strategy.core.params.issuing import ParameterGather, arrived
from zerosync_strategy.core.params.scheduler import GatherScheduler
from zerosync_strategy.core.params.units import HeldChunk, Unit

RECEIVED = 2
"""Receive buffers that the gathers of held parameters may use at a time."""
AHEAD = 2
"""Chunks to gather ahead if not all parameters are held."""


class ParameterCache:
    """Keeps parameters of a ZeRO-3 engine unsharded from their first use in a window to the optimizer step.

    Attributes:
        infers: all parameters are unsharded, for a phase without backwards.
    """

    def __init__(self, units: list[Unit], scheduler: GatherScheduler, plan: HoldPlan) -> None:
        self._units, self._scheduler, self.plan = units, scheduler, plan
        self._steps = False  # an optimizer step is under way
        self.infers = False
        self._chunks: list[HeldChunk] = []
        self._chunk_of: dict[Record, HeldChunk] = {}
        scheduler.before_read = self.before_read
        if plan.holds_all:
            self._hold_units()

    def detach(self) -> None:
        self.release_constants()
        self.plan.drop(self.plan.records)
        held, free, in_flight, _ = sort_out(self.plan.records)
        self._reshard([*held, *free, *in_flight])
        for unit in self._units:
            unit.held = None
        self._scheduler.before_read = None

    def end_window(self, params: Iterable[Any]) -> None:
        """Start a new window: a step has resharded ``params``, except those that it does not change."""
        records = [param._zerosync_record for param in params]
        self.plan.drop([record for record in records if not record.bits & STEPS])
        for chunk in self._chunks:
            chunk.issued = False
        for unit in self._units:
            unit.pending = True
        if self.plan.counts and self.plan.count_window():
            self._hold_units()
        self.plan.reset_counts()

    def set_budget(self, budget: int) -> tuple[int, int]:
        """Hold what fits into ``budget`` bytes from the next window on, where nothing was held before.

        Call it between two windows. A model that fits is held in full. Return the bytes held in full, and the bytes of
        node shards within the budget.
        """
        self.plan.set_budget(budget)
        if self.plan.budget != 0:
            self._hold_units()
        held = (record.param for record in self.plan.records if record.hold)
        in_full = sum(zero3.full_bytes(param) for param in held if not zero3.is_persistent(param))
        return in_full, self.plan.chosen_in_shards

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Around forwards without backwards: all parameters are unsharded, and no unit communicates. Collective.

        Parameters that are not held are resharded at the end.
        """
        records = self._gather_all()
        if self.plan.holds_all:
            yield
            return
        claim(records, PHASE)
        self.infers = True
        try:
            yield
        finally:
            self.infers = False
            self._release(records)

    @internal
    def _gather_all(self) -> list[Record]:
        """Unshard all parameters; return the records of those that were sharded."""
        if self.plan.holds_all:
            self._issue_all()
        arrived(self.plan.records)
        records = [record for record in self.plan.records if zero3.is_released(record.param)]
        chunks = self._scheduler.chunks(record.param for record in records)
        issued = [self._scheduler.issue(chunk) for _, of_group in chunks for chunk in of_group]
        for gather in itertools.chain.from_iterable(issued):
            gather.wait()
        return records

    # ---- units whose parameters are all held -----------------------------------------------------------------------

    def _hold_units(self) -> None:
        """Divide the parameters of held units into chunks, and assign each unit its chunks."""
        divide_anew(self.plan.records)
        held = [unit for unit in self._units if self.plan.holds_all or (unit.params and all(map(_stays, unit.records)))]
        unit_of = {param: unit for unit in held for param in unit.params}
        self._chunks, self._chunk_of = [], {}
        for trains in (True, False):  # separately, since frozen ones are gathered once
            params = [param for param in unit_of if param.requires_grad == trains]
            for group, chunks in self._scheduler.chunks(params, unit_of):
                for members in chunks:
                    self._chunks.append(chunk := HeldChunk(len(self._chunks), group, members))
                    self._chunk_of.update((param._zerosync_record, chunk) for param in members)
        for unit in self._units:
            unit.held = None
        for unit in held:
            unit.held = self._chunks_of(unit.records)

    def _chunks_of(self, records: Iterable[Record]) -> list[HeldChunk]:
        """Return the chunks with ``records``, in their order."""
        return [self._chunks[index] for index in sorted({self._chunk_of[record].index for record in records})]

    def before_forward(self, unit: Unit, model_runs: bool) -> None:
        """Unshard ``unit``, which is held, for its forward. ``model_runs``: a forward of the whole model is running."""
        if unit.pending or zero3.least_status(unit.params) != UNSHARDED:
            self._unshard(unit, model_runs)
            if unit.pending:
                for record in unit.records:
                    record.use()

    def after_forward(self, unit: Unit) -> None:
        """Unshard ``unit`` again if its forward has resharded some of it, because the backward needs it."""
        if zero3.least_status(unit.params) != UNSHARDED:
            self._unshard(unit, False)
        if unit.pending:
            settle(unit.records)

    @internal
    def _unshard(self, unit: Unit, model_runs: bool) -> None:
        """Unshard a unit, make the current stream wait for its gathers, and issue the next ones."""
        if self.plan.holds_all:
            self._issue_all()
        chunks = [] if self.infers else unit.held or []
        is_sharded = zero3.least_status(unit.params) == SHARDED
        due = {chunk.index: chunk for chunk in chunks if is_sharded or not chunk.issued}
        if model_runs and not self.plan.holds_all:
            for chunk in chunks:
                for ahead in self._chunks[chunk.index + 1 : chunk.index + 1 + AHEAD]:
                    if ahead.group == chunk.group and not ahead.issued:
                        due[ahead.index] = ahead
        if due:
            self._issue([due[index] for index in sorted(due)])
        gathers = dict.fromkeys([record.gather for record in unit.records])
        pending = [gather for gather in gathers if gather is not None and not gather.is_complete]
        for gather in pending:
            gather.wait()
            gather.join()
        unit.pending = not all([gather.is_complete for gather in pending])

    def _issue_all(self) -> None:
        """Issue the gathers of all chunks that are missing in this window, on every rank alike (W6)."""
        if missing := [chunk for chunk in self._chunks if not chunk.issued]:
            self._issue(missing)

    @internal
    def _issue(self, chunks: Iterable[HeldChunk]) -> None:
        """Issue the gathers of the sharded parameters of ``chunks``.

        Before a further one, the values of older gathers are copied out, so that :data:`RECEIVED` have buffers at most.
        """
        in_flight: deque[ParameterGather] = deque()
        for chunk in chunks:
            while len(in_flight) >= RECEIVED:
                in_flight.popleft().copy_out_on_gather_stream()
            chunk.issued = True
            if missing := zero3.released(chunk.params):
                in_flight.extend(self._scheduler.issue(missing))
                self.plan.claim([param._zerosync_record for param in missing])

    # ---- around forwards, backwards and steps ----------------------------------------------------------------------

    def backward_begins(self) -> None:
        """Unshard held parameters again that something has resharded since the forwards of this window."""
        held = [record for record in self.plan.records if record.bits & WINDOW]
        if not any(not zero3.is_persistent(param) for param in zero3.released([record.param for record in held])):
            return
        records = [record for record in held if record in self._chunk_of]
        self._issue(self._chunks_of(records))
        arrived(records)

    def before_read(self, params: Iterable[Zero3Parameter]) -> None:
        """Issue the chunks of ``params`` for a reader that no hook serves."""
        if self._steps:
            return  # at its end DeepSpeed gathers persistent parameters; the rest of their chunk is not needed
        for param in params:
            if (chunk := self._chunk_of.get(param._zerosync_record)) is not None:
                if self.plan.holds_all:
                    self._issue_all()
                self._issue((chunk,))

    def stepping(self) -> AbstractContextManager[None]:
        """Around an optimizer step, which leaves held parameters unsharded if it does not change them."""
        return replaced(self, "_steps", True)

    def release(self, records: Iterable[Record]) -> None:
        """Reshard ``records``, which no unit uses; in an optimizer step, only what the step changes."""
        stay = set(self.plan.before_step()) if self._steps else set()
        self._reshard([record for record in records if record not in stay])

    def release_constants(self) -> None:
        """Reshard what steps have left unsharded, because shards are about to be read or written."""
        records = [record for record in self.plan.records if record.bits & STEPS]
        self._release([record for record in records if not zero3.is_persistent(record.param)])
        drop(records, STEPS)

    def _release(self, records: list[Record]) -> None:
        self._reshard(records)
        drop(records, PHASE)
        self.plan.drop(records)

    # ---- other units -----------------------------------------------------------------------------------------------

    def reshard(self, records: list[Record]) -> None:
        """Reshard ``records``, which no unit uses any more, but those that have another claim or are to be held.

        Tensors that autograd has saved of them get their values back with the next unshard.
        """
        held, free, in_flight, others_stay = sort_out(records)
        if held:
            self.plan.claim(held)
        if held or others_stay:
            settle(records)
        if in_flight:
            _wait(in_flight)
            free += zero3.gathered(in_flight)  # the others are in flight for the program
        special: list[Record] = []
        for record in free:  # without calls for each
            if not record.plain:
                special += (record,)
        if special:
            self._reshard(special)
            free = [record for record in free if record.plain]
        if free:
            with zero3.as_it_is():
                reshard(free, keeps_storage=True)

    def recover(self) -> None:
        self.reshard([record for record in self.plan.records if not record.hold])

    @internal
    def _reshard(self, records: Iterable[Record]) -> None:
        """Reshard ``records`` in spite of their claims. Tensors that autograd has saved of them keep their values."""
        arrived(records)
        gathered = zero3.gathered(records)
        if self._scheduler.issuing.gather_streams:
            self._scheduler.join(gathered)  # some may be copied out, and no stream has used them (L2)
        if plain := [record for record in gathered if record.plain]:
            reshard(plain, keeps_storage=False)
        for record in gathered:
            if not record.plain:
                record.param.partition()


_wait = internal(arrived)


def _stays(record: Record) -> bool:
    return record.hold or zero3.is_persistent(record.param)
