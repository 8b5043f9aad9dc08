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

import torch

from zerosync_strategy.core.comm.collectives import gather_objects
from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.engine.zero import MasterWeights

_State = dict[str, Any]


@dataclass
class _Cohort:
    """Parameters that were stepped at the same steps.

    Attributes:
        params: the parameters.
        scalars: by index of the master weights, the optimizer's states that are not of their shape; none of those that
            were never stepped.
    """

    params: set[Any]
    scalars: dict[int, _State] = field(default_factory=dict)


class FrozenParameters:
    """Keeps an optimizer of ZeRO from stepping what is frozen.

    Args:
        optimizer: returns the torch optimizer that steps the master weights.
        params: that it trains.
        masters: returns the master weights.
        states_made: is called when the optimizer has made states after its first step.
    """

    def __init__(
        self, optimizer: Callable[[], Any], params: Sequence[Any], masters: Callable[[], list[MasterWeights]],
        states_made: Callable[[], None],
    ) -> None:  # fmt: skip
        self._optimizer = optimizer
        self._params = params
        self._masters = masters
        self._states_made = states_made
        self._cohorts = [_Cohort(set(params))]
        self._frozen: set[Any] | None = None  # in all backwards since the last step; None before the first

    def backward_begins(self, is_first: bool) -> None:
        """A backward begins, the first of its step or a further one: what requires a gradient now is stepped."""
        with zero3.as_it_is():
            frozen = {param for param in self._params if not param.requires_grad}
        self._frozen = frozen if is_first or self._frozen is None else self._frozen & frozen

    def forget(self) -> None:
        """The gradients since the last step are dropped."""
        self._frozen = None

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around the step of the ZeRO optimizer."""
        frozen, self._frozen = self._frozen or set(), None
        if frozen:
            self._split(frozen)
        if len(self._cohorts) == 1:
            yield
            return
        optimizer = self._optimizer()
        stock, own = optimizer.step, vars(optimizer).get("step")  # a learning-rate scheduler sets one on the instance
        cohorts = [cohort for cohort in self._cohorts if cohort.params.isdisjoint(frozen)]
        optimizer.step = lambda *_: self._step(optimizer, cohorts, stock)
        try:
            yield
        finally:
            del optimizer.step
            if own is not None:
                optimizer.step = own

    def _split(self, frozen: set[Any]) -> None:
        if len(self._cohorts) == 1:
            states = [self._optimizer().state.get(master.flat) for master in self._masters()]
            pairs = zip(states, self._masters(), strict=True)
            self._cohorts[0].scalars = {
                index: _scalars(state, master.flat) for index, (state, master) in enumerate(pairs) if state
            }
        for cohort in list(self._cohorts):
            apart = cohort.params & frozen
            if apart and apart != cohort.params:
                cohort.params -= apart
                self._cohorts.append(_Cohort(apart, copy.deepcopy(cohort.scalars)))

    def _step(self, optimizer: Any, cohorts: list[_Cohort], stock: Callable[[], Any]) -> None:
        """In place of ``stock``, the step of ``optimizer``: step the parameters of ``cohorts`` alone."""
        masters = {id(master.flat): (index, master) for index, master in enumerate(self._masters())}
        for group in optimizer.param_groups:
            whole = list(group["params"])
            for index, master in (masters[id(flat)] for flat in whole):
                for cohort in cohorts:
                    runs = list(_runs(master, cohort.params))
                    if not runs:
                        continue
                    group["params"] = self._enter(optimizer, index, master.flat, runs, cohort)
                    stock()
                    self._leave(optimizer, index, master.flat, runs, cohort, group["params"])
                    if cohort is self._cohorts[0] or not _scalars(optimizer.state[master.flat], master.flat):
                        optimizer.state[master.flat].update(copy.deepcopy(cohort.scalars[index]))
            group["params"] = whole

    def _enter(
        self, optimizer: Any, index: int, flat: Any, runs: list[tuple[int, int]], cohort: _Cohort
    ) -> list[torch.nn.Parameter]:
        """Return views of ``flat`` for the optimizer to step, with their gradients and states."""
        views = []
        scalars = cohort.scalars.get(index)
        for begin, end in runs:
            view = torch.nn.Parameter(flat.data[begin:end])
            view.grad = flat.grad[begin:end]
            if scalars is not None:
                own = {key: value[begin:end] for key, value in _shaped(optimizer.state[flat], flat).items()}
                optimizer.state[view] = own | copy.deepcopy(scalars)
            views.append(view)
        return views

    def _leave(
        self, optimizer: Any, index: int, flat: Any, runs: list[tuple[int, int]], cohort: _Cohort, views: list[Any]
    ) -> None:
        """Take the states of the ``views`` after their step."""
        whole = optimizer.state[flat]
        for view, (begin, end) in zip(views, runs, strict=True):
            state = optimizer.state.pop(view, {})  # plain SGD has none
            cohort.scalars[index] = _scalars(state, view)
            for key, value in _shaped(state, view).items():
                if whole.get(key) is None:
                    whole[key] = torch.zeros_like(flat.data, dtype=value.dtype)
                    self._states_made()
                part = whole[key][begin:end]
                if part.data_ptr() != value.data_ptr():
                    part.copy_(value)

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
        for param in self._params:
            cohorts[cohort_of.get(names[param], 0)].params.add(param)
        self._cohorts = cohorts
        self._frozen = None


def _runs(master: MasterWeights, params: set[Any]) -> Iterator[tuple[int, int]]:
    """Yield where the elements of ``params`` lie, neighbours as one."""
    run: tuple[int, int] | None = None
    for param, begin, end in master.slices:
        if param not in params:
            continue
        if run is not None and run[1] == begin:
            run = (run[0], end)
            continue
        if run is not None:
            yield run
        run = (begin, end)
    if run is not None:
        yield run


def _shaped(state: _State, like: torch.Tensor) -> dict[str, torch.Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.shape == like.shape}


def _scalars(state: _State, like: torch.Tensor) -> _State:
    shaped = _shaped(state, like)
    return {key: value for key, value in state.items() if key not in shaped}
