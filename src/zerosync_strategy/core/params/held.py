"""Which ZeRO-3 parameters are held from their first use in a window to the optimizer step, and why.

All are held if the budget allows; else those that save the most bytes per byte held: the ones that the first window
gathered most often. A step does not reshard a held parameter that no optimizer trains, so it is sent once (R4). Of the
parameters that do not fit, those that save the most may be copied to host memory (``copies.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

from zerosync_strategy.core.comm.nodes import Sent
from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.engine.parameter import STEPS, WINDOW, Record
from zerosync_strategy.core.engine.transitions import claim, drop
from zerosync_strategy.core.engine.types import Zero3Parameter
from zerosync_strategy.core.params.copies import fitting
from zerosync_strategy.core.params.scheduler import GatherScheduler


class HoldPlan:
    """Chooses the parameters of a ZeRO-3 engine to hold (``record.hold``), and counts the bytes of those that are held.

    Args:
        budget: bytes of gathered parameters to hold in addition to persistent ones; ``None``: no limit. It includes
            node shards unless they have a limit of their own.
        automatic: :meth:`set_budget` will set the budget.
        is_constant: returns whether no optimizer trains a parameter.

    Attributes:
        counts: gathers are being counted, because it is unknown yet what to hold.
        holds_all: all parameters are held, so that only the first module of a window gathers. False if all others are
            persistent: the modules that first need those gather them.
        peak_bytes: the most bytes held at once since the last step.
    """

    def __init__(
        self,
        scheduler: GatherScheduler,
        budget: int | None,
        automatic: bool,
        is_constant: Callable[[Zero3Parameter], bool],
    ) -> None:
        self.records, self.automatic = scheduler.records, automatic
        self.host, self.node_shards = scheduler.issuing.host, scheduler.issuing.node_shards
        shards = self.node_shards
        self._in_budget = shards if shards is not None and shards.shared else None
        self._copies, self._is_plain, self._is_constant = scheduler.copies, scheduler.is_plain, is_constant
        self._gathers: Counter[Record] = Counter()
        self._counted_windows = 0
        self._left_unsharded: set[Record] = set()  # left unsharded by the last step but one
        self._gathered_constants: set[Record] = set()  # persistent constants that a step has gathered
        self.held_bytes = self.peak_bytes = 0
        self._set_budget(budget)
        self.counts = budget is not None and (budget > 0 or automatic or bool(self._copies))

    def _set_budget(self, budget: int | None) -> None:
        self.budget, self.holds_all = budget, budget is None
        for record in self.records:
            record.hold = budget is None

    @property
    def everything(self) -> int:
        """Bytes of all parameters that can be held."""
        return sum(zero3.full_bytes(record.param) for record in self.records if not zero3.is_persistent(record.param))

    @cached_property
    def constants(self) -> list[Record]:
        """The parameters that no optimizer step changes."""
        return [record for record in self.records if self._is_constant(record.param)]

    def forget_constants(self) -> None:
        """Find the constants anew: another engine may train parameters that the others do not."""
        vars(self).pop("constants", None)

    # ---- the choice ----------------------------------------------------------------------------------------------

    def count(self, params: Iterable[Zero3Parameter]) -> None:
        """Count the sharded parameters among ``params``, which units are about to gather."""
        self._gathers.update(param._zerosync_record for param in zero3.released(params))

    def count_window(self) -> bool:
        """After an optimizer step that ends a counted window, choose what to hold; return whether this was done."""
        if not self._gathers:
            return False
        self._counted_windows += 1
        if self.automatic:
            return False
        self.counts = False
        self._choose(self.budget or 0)
        return bool(self.budget)

    def set_budget(self, budget: int) -> None:
        """Choose, between two windows, what to hold within ``budget`` bytes."""
        self.counts = False
        self._set_budget(None if self.everything <= budget else budget)
        if self.budget is not None:
            self._choose(budget)
        else:
            for copies in self._copies:
                copies.choose(set(), [record.param for record in self.constants])

    @property
    def chosen_in_shards(self) -> int:
        """The most bytes of node shards, within the budget, in a window."""
        shards = self._in_budget
        return 0 if shards is None else sum(map(shards.bytes_of, shards.chosen or ()))

    def wanted_in_shards(self) -> int:
        """Return the bytes of node shards, within the budget, if every parameter that is gathered again had one."""
        return sum(map(self._shard_bytes, self._saving()))

    def _shard_bytes(self, param: Zero3Parameter) -> int:
        """Return the bytes of the node shard, within the budget, that ``param`` may have; 0 if it has none."""
        shards = self._in_budget
        return shards.bytes_of(param) if shards is not None and self._is_plain(param) else 0

    def _saving(self) -> list[Zero3Parameter]:
        """Return the parameters that are gathered more than once per window, in falling order of what they save."""
        constants = set(self.constants)
        # The order must be the same on all ranks; ids are.
        by_saving = sorted(
            (
                (gathers - (record not in constants) * self._counted_windows, record.param)
                for record, gathers in self._gathers.items()
            ),
            key=lambda item: (-item[0], -zero3.full_bytes(item[1]), zero3.param_id(item[1])),
        )
        return [param for saved, param in by_saving if saved > 0 and not zero3.is_persistent(param)]

    def _choose(self, budget: int) -> None:
        saving = self._saving()
        held = [param._zerosync_record for param in self._fitting(saving, budget)]
        for record in held:
            record.hold = True
        others = [param for param in saving if not param._zerosync_record.hold and self._is_plain(param)]
        constants = set(self.constants)
        leaving = [record.param for record in held if record in constants]
        for copies in reversed(self._copies):  # node shards before the host's memory, which takes the rest
            chosen = set(fitting(filter(copies.may_have, others), copies.limit, copies.bytes_of))
            copies.choose(chosen, filter(copies.may_have, leaving))
            others = [param for param in others if param not in chosen]

    def _fitting(self, params: list[Zero3Parameter], budget: int) -> list[Zero3Parameter]:
        """Return the parameters of ``params``, in order, to hold within ``budget`` bytes.

        Node shards in the same budget take precedence: they save as many bytes between nodes and take less memory.
        """
        shards = self._in_budget
        if shards is None:
            return fitting(params, budget)
        in_shards = sum(map(self._shard_bytes, params))
        shards.limit = min(in_shards, budget)
        if in_shards > budget:
            return []
        return fitting(params, budget - in_shards, lambda param: zero3.full_bytes(param) - self._shard_bytes(param))

    # ---- what is held --------------------------------------------------------------------------------------------

    def claim(self, records: Iterable[Record]) -> None:
        """Claim ``records``, which are unsharded or about to be gathered, until the step."""
        new = [record for record in records if not record.bits & WINDOW]
        claim(new, WINDOW)
        for record in new:
            self.held_bytes += record.nbytes
        for copies in self._copies:
            copies.free([record.param for record in new if record.nbytes])
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def drop(self, records: Iterable[Record]) -> None:
        held = [record for record in records if record.bits & (WINDOW | STEPS)]
        for record in held:
            if record.bits & WINDOW:
                self.held_bytes -= record.nbytes
        drop(held, WINDOW | STEPS)

    def before_step(self) -> list[Record]:
        """Claim and return the unsharded parameters that the next step does not change, and so leaves unsharded."""
        crossed = [record for record in self.records if record.bits & STEPS]
        stay = [record for record in zero3.gathered(self.constants) if record.stays]
        self._left_unsharded = set(crossed)
        drop(crossed, STEPS)
        claim(stay, STEPS)
        return stay

    def reset_counts(self) -> None:
        self.peak_bytes = self.held_bytes
        for copies in self._copies:
            copies.reset_counts()
        gathered = zero3.gathered(self.constants)
        self._gathered_constants = {record for record in gathered if zero3.is_persistent(record.param)}

    def needed(self, sizes: Mapping[Any, Sent]) -> Sent:
        """Return what this rank had to send to gather parameters in the window of the last step, and reset the counts.

        It is derived from what modules asked for. ``sizes``: what it sends for one gather of each.
        """
        host, shards, nbytes, between = self.host, self.node_shards, 0, 0
        for param, (sent, sent_between) in sizes.items():  # without calls for each, as a rule
            record: Record = param._zerosync_record
            asked, record.gathers = record.gathers, 0
            crossings = asked  # gathers from other nodes
            if (
                record in self._left_unsharded
                or record in self._gathered_constants
                or (host is not None and host.was_there(param))
            ):
                asked = crossings = 0
            elif not record.nbytes:  # persistent: DeepSpeed's own step gathers it
                asked = crossings = 1
            elif record.hold or (host is not None and host.keeps(param)):
                asked = crossings = asked > 0
            elif shards is not None and shards.keeps(param):
                crossings = asked > 0 and not shards.was_there(param)
            nbytes += asked * (sent - sent_between) + crossings * sent_between
            between += crossings * sent_between
        return Sent(nbytes, between)
