"""Parameters that are frozen while others train: not stepped, as in plain torch, and trained once they are thawed (N1).

ZeRO steps its flat master weights in whole, frozen parameters with gradient zero: weight decay and momentum would move
them, and thawed ones would go on at the others' step count. So the optimizer is given *runs* in their place: views of
the master weights and of its own states, each with scalar states (as Adam's ``step``) of its own. Parameters that were
stepped at the same steps are a *cohort*, and have the same scalars. Until a parameter is frozen in all backwards of a
step, there is one cohort, and ZeRO steps as ever.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from zerosync_strategy.core.comm.collectives import gather_objects
from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.engine.zero import MasterShard, offloads
from zerosync_strategy.core.gradients.reducer import Reducer, StepSlice, StepSlices
from zerosync_strategy.core.optimizer.stepping import (
    Part,
    Scalars,
    can_step_by_part,
    copied,
    scalar_states,
    stepping_by_part,
)


@dataclass
class _Cohort:
    """Parameters that were stepped at the same steps, and the states that they share."""

    params: set[Any]
    scalars: Scalars = field(default_factory=dict)


class FrozenParameters:
    """Keeps the optimizer that ``reducer`` reduces for from stepping what is frozen."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._cohorts = [_Cohort(set(reducer.params))]
        self._frozen: set[Any] | None = None  # in all backwards since the last step; None before the first

    @property
    def _optimizer(self) -> Any:
        """The torch optimizer that steps the master weights."""
        return self._reducer.optimizer.optimizer

    def backward_begins(self, is_first: bool) -> None:
        """A backward begins, the first of its step or not: what requires a gradient now is stepped."""
        with zero3.as_it_is():
            frozen = {param for param in self._reducer.params if not param.requires_grad}
        self._frozen = frozen if is_first or self._frozen is None else self._frozen & frozen

    def reset(self) -> None:
        """The gradients since the last step are dropped."""
        self._frozen = None

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around the step of the ZeRO optimizer."""
        frozen, self._frozen = self._frozen or set(), None
        if frozen:
            self._split(frozen)
        slices = self._slices()
        if len(self._cohorts) == 1 and slices is None:
            yield
            return
        masters = self._reducer.master_shards() if len(self._cohorts) > 1 else None
        if slices is None:
            slices = [(master.flat, [StepSlice(0, master.flat.numel(), None)]) for master in masters or ()]
        if masters is None:
            self._cohorts[0].scalars = self._scalars_now([flat for flat, _ in slices])
        cohorts = [cohort for cohort in self._cohorts if cohort.params.isdisjoint(frozen)]
        with stepping_by_part(self._optimizer, _parts(slices, masters, cohorts), self._reducer.states_made):
            yield
        for index, (flat, _) in enumerate(slices):
            # DeepSpeed's checkpoints have one count of steps: that of the first.
            shared = (cohort.scalars.get(index) for cohort in self._cohorts)
            if scalars := next(filter(None, shared), None):
                self._optimizer.state[flat].update(copied(scalars))

    def _slices(self) -> StepSlices | None:
        """Return the slices in which the coming step is to be made; ``None``: at once."""
        if offloads(self._reducer.optimizer) or not can_step_by_part(self._optimizer):
            return None
        slices = self._reducer.step_slices()
        return slices if any(len(of_master) > 1 for _, of_master in slices) else None

    def _scalars_now(self, flats: Sequence[Any]) -> Scalars:
        states = self._optimizer.state
        return {index: scalar_states(states[flat], flat) for index, flat in enumerate(flats) if states.get(flat)}

    def _split(self, frozen: set[Any]) -> None:
        if len(self._cohorts) == 1:
            self._cohorts[0].scalars = self._scalars_now([master.flat for master in self._reducer.master_shards()])
        for cohort in list(self._cohorts):
            apart = cohort.params & frozen
            if apart and apart != cohort.params:
                cohort.params -= apart
                self._cohorts.append(_Cohort(apart, copy.deepcopy(cohort.scalars)))

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def state(self, names: Mapping[Any, str], group: Any) -> list[Any]:
        """Return the cohorts, for a checkpoint; none where nothing was frozen, and else a collective call.

        Returns:
            By cohort, the names of the parameters, and the scalars. A rank alone has those of its own shard.
        """
        if len(self._cohorts) == 1:
            return []
        everyone = gather_objects([cohort.scalars for cohort in self._cohorts], group)
        state = []
        for cohort, *by_rank in zip(self._cohorts, *everyone, strict=True):
            merged = {index: scalars for of_rank in by_rank for index, scalars in of_rank.items()}
            state.append((sorted(names[param] for param in cohort.params), merged))
        return state

    def load(self, state: list[Any], names: Mapping[Any, str]) -> None:
        """Go on with what :meth:`state` has returned."""
        cohort_of = {name: number for number, (of_cohort, _) in enumerate(state) for name in of_cohort}
        cohorts = [_Cohort(set(), copy.deepcopy(scalars)) for _, scalars in state] or [_Cohort(set())]
        for param in self._reducer.params:
            cohorts[cohort_of.get(names[param], 0)].params.add(param)
        self._cohorts = cohorts
        self._frozen = None


def _parts(
    slices: StepSlices, masters: Sequence[MasterShard] | None, cohorts: Sequence[_Cohort]
) -> Callable[[Any], Iterator[Part]]:
    """Return what lists the parts of master weights: of each slice, those of the ``cohorts``, which are stepped.

    Args:
        masters: those of ``slices``, where the cohorts have parts of them only.
    """
    index_of = {id(flat): index for index, (flat, _) in enumerate(slices)}

    def parts(flat: Any) -> Iterator[Part]:
        index = index_of[id(flat)]
        whole = [(0, flat.numel())]
        runs = [whole if masters is None else _runs(masters[index], cohort.params) for cohort in cohorts]
        for begin, end, stepped in slices[index][1]:
            for cohort, of_cohort in zip(cohorts, runs, strict=True):
                within = [(max(a, begin), min(b, end)) for a, b in of_cohort if a < end and begin < b]
                yield Part(index, within, cohort.scalars)
            yield Part(index, [], {}, stepped)

    return parts


def _runs(master: MasterShard, params: set[Any]) -> list[tuple[int, int]]:
    """Return where the elements of ``params`` lie, neighbours as one."""
    runs: list[tuple[int, int]] = []
    for param, begin, end in master.slices:
        if param in params:
            begin = runs.pop()[0] if runs and runs[-1][1] == begin else begin
            runs.append((begin, end))
    return runs
