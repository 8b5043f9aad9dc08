"""The stepper makes the torch optimizer's step: without frozen parameters, and in slices if possible (N1).

ZeRO steps its flat master weights as a whole, with gradient zero for frozen parameters. Weight decay and momentum would
move these, and a parameter that is unfrozen later would continue at the step count of the others. So the optimizer is
given *pieces* instead: views of the master weights and of its own states, with scalar states (as Adam's ``step``) of
their own. Parameters that were stepped in the same steps form a *cohort* and share their scalars. There is one cohort
until a parameter is frozen for a whole step.

Stepping in slices also allows gathering the parameters of one slice while the next slice is stepped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adadelta, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop
from torch.optim import optimizer as torch_optimizer

from zerosync_strategy.core.comm.collectives import gather_objects
from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.engine.zero import MasterShard, offloads
from zerosync_strategy.core.gradients.shards import GradientShards
from zerosync_strategy.core.optimizer.masters import Masters, StepSlice, StepSlices

State = dict[str, Any]
Bounds = list[tuple[int, int]]
"""Bounds of elements in master weights, ascending."""
# They step each tensor independently. Another class may count steps by group.
STEPPED_BY_TENSOR = frozenset([SGD, Adadelta, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop])
_PACKAGES_BY_TENSOR = frozenset(["bitsandbytes", "deepspeed"])


def counts_by_tensor(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether calls of ``step()``, each with some of the parameters, are known to equal a single call."""
    return type(optimizer) in STEPPED_BY_TENSOR or type(optimizer).__module__.partition(".")[0] in _PACKAGES_BY_TENSOR


@dataclass
class _Cohort:
    """Parameters stepped in the same steps; ``scalars`` are their shared states, by index of the master weights."""

    params: set[nn.Parameter]
    scalars: dict[int, State] = field(default_factory=dict)


class _Piece(NamedTuple):
    """What the optimizer steps in place of master weights: a cohort's bounds in one slice of them."""

    group: dict[str, Any]
    flat: torch.Tensor
    master: int
    bounds: Bounds
    cohort: _Cohort
    scalars: State | None  # of the cohort before the step
    stepped: Callable[[], None] | None  # called after it


class Stepper:
    """Makes the optimizer of ``shards`` and ``masters`` step the parameters that are not frozen.

    Attributes:
        mode: ``"train"`` or ``"eval"``, the optimizer's method that last exchanged the weights since they were loaded;
            empty: none did.
    """

    mode = ""

    def __init__(self, shards: GradientShards, masters: Masters) -> None:
        self._zero, self._params, self._masters = shards.optimizer, shards.params, masters
        self._cohorts = [_Cohort(set(shards.params))]
        self._frozen: set[nn.Parameter] | None = None  # in all backwards since the last step; None: no backward yet

    def backward_begins(self, is_first: bool) -> None:
        """Record what is frozen when a backward begins: a parameter that requires a gradient in any one is stepped."""
        with zero3.as_it_is():
            frozen = {param for param in self._params if not param.requires_grad}
        self._frozen = frozen if is_first or self._frozen is None else self._frozen & frozen

    def reset(self) -> None:
        self._frozen = None

    # ---- the step ------------------------------------------------------------------------------------------------

    @contextmanager
    def stepping(self) -> Iterator[None]:
        frozen, self._frozen = self._frozen or set(), None
        if frozen:
            self._split(frozen)
        slices = self._slices()
        if len(self._cohorts) == 1 and slices is None:
            yield
            return
        masters = self._masters.by_param() if len(self._cohorts) > 1 else None
        if slices is None:
            slices = _whole(masters or ())
        if masters is None:
            self._cohorts[0].scalars = self._scalars_now([flat for flat, _ in slices])
        cohorts = [cohort for cohort in self._cohorts if cohort.params.isdisjoint(frozen)]
        with self._stepping_by(lambda: self._pieces(slices, masters, cohorts)):
            yield
        for index, (flat, _) in enumerate(slices):
            # DeepSpeed's checkpoints have one step count, here that of the first cohort.
            shared = (cohort.scalars.get(index) for cohort in self._cohorts)
            if scalars := next(filter(None, shared), None):
                self._zero.optimizer.state[flat].update(_copied(scalars))

    def change(self, change: Callable[[], None]) -> None:
        """Call ``change``, a method of the torch optimizer that changes the weights of stepped parameters."""
        with self._masters.in_groups():
            if len(self._cohorts) == 1:
                change()
                return
            masters = self._masters.by_param()
            pieces = self._pieces(_whole(masters), masters, self._cohorts)
            stepped = [piece for piece in pieces if piece.scalars is not None]
            with self._without_params():
                self._call(stepped, change)

    def _slices(self) -> StepSlices | None:
        """Return the slices in which to make the next step; ``None``: as a whole."""
        if offloads(self._zero) or not _can_step_by_part(self._zero.optimizer):
            return None
        slices = self._masters.slices()
        return slices if any(len(of_master) > 1 for _, of_master in slices) else None

    def _scalars_now(self, flats: Sequence[torch.Tensor]) -> dict[int, State]:
        states = self._zero.optimizer.state
        return {index: _scalar_states(states[flat], flat) for index, flat in enumerate(flats) if states.get(flat)}

    def _split(self, frozen: set[nn.Parameter]) -> None:
        if len(self._cohorts) == 1:
            self._cohorts[0].scalars = self._scalars_now([master.flat for master in self._masters.by_param()])
        for cohort in list(self._cohorts):
            split = cohort.params & frozen
            if split and split != cohort.params:
                cohort.params -= split
                self._cohorts.append(_Cohort(split, copy.deepcopy(cohort.scalars)))

    def _pieces(
        self, slices: StepSlices, masters: Sequence[MasterShard] | None, cohorts: Sequence[_Cohort]
    ) -> Iterator[_Piece]:
        """Yield the pieces of a step: by slice, a piece per cohort, then a piece for the slice's callback.

        ``masters`` has the parameters in the ``slices``' master weights; ``None`` if a single cohort has everything.
        """
        index_of = {id(flat): index for index, (flat, _) in enumerate(slices)}
        for group in self._zero.optimizer.param_groups:
            for flat in group["params"]:
                index = index_of[id(flat)]
                whole = [(0, flat.numel())]
                bounds = [whole if masters is None else _bounds_of(masters[index], cohort.params) for cohort in cohorts]
                for begin, end, stepped in slices[index][1]:
                    for cohort, of_cohort in zip(cohorts, bounds, strict=True):
                        within = [(max(a, begin), min(b, end)) for a, b in of_cohort if a < end and begin < b]
                        yield _Piece(group, flat, index, within, cohort, cohort.scalars.get(index), None)
                    if stepped is not None:
                        yield _Piece(group, flat, index, [], self._cohorts[0], None, stepped)

    @contextmanager
    def _stepping_by(self, pieces: Callable[[], Iterator[_Piece]]) -> Iterator[None]:
        """While active, a step of the torch optimizer steps ``pieces``, one after the other."""
        optimizer = self._zero.optimizer
        stock, own = optimizer.step, vars(optimizer).get("step")  # a learning-rate scheduler sets one on the instance
        # Wrappers that count calls of step() count a single one.
        again = type(optimizer).step.__wrapped__.__get__(optimizer) if _can_step_by_part(optimizer) else stock

        def step(*_: object, **__: object) -> None:
            work = list(pieces())
            by_tensor = counts_by_tensor(optimizer)
            calls = [[piece] for piece in work] if by_tensor else [work]
            steps = [any(piece.bounds for piece in of_call) for of_call in calls]
            last = max((number for number, has in enumerate(steps) if has), default=-1)
            with self._without_params():
                for number, of_call in enumerate(calls):
                    # An optimizer that counts steps by group also counts a step in which all is frozen.
                    if steps[number] or not by_tensor:
                        self._call(of_call, stock if number == last else again)
                    for piece in of_call:
                        if piece.stepped is not None:
                            piece.stepped()

        optimizer.step = step
        try:
            yield
        finally:
            del optimizer.step
            if own is not None:
                optimizer.step = own

    @contextmanager
    def _without_params(self) -> Iterator[None]:
        groups = [(group, group["params"]) for group in self._zero.optimizer.param_groups]
        try:
            for group, _ in groups:
                group["params"] = []
            yield
        finally:
            for group, flats in groups:
                group["params"] = flats

    def _call(self, pieces: Sequence[_Piece], method: Callable[[], object]) -> None:
        """Call a method of the torch optimizer while its groups hold ``pieces`` and nothing else."""
        entered = [(piece, _enter(self._zero.optimizer, piece)) for piece in pieces if piece.bounds]
        for piece, views in entered:
            piece.group["params"] = piece.group["params"] + views
        method()
        for piece, views in entered:
            piece.group["params"] = []
            piece.cohort.scalars[piece.master] = self._leave(piece, views)

    def _leave(self, piece: _Piece, views: list[nn.Parameter]) -> State:
        """Copy the states of the stepped ``views`` into the whole states; return the scalar states."""
        whole, scalars = self._zero.optimizer.state[piece.flat], {}
        for view, (begin, end) in zip(views, piece.bounds, strict=True):
            state = self._zero.optimizer.state.pop(view, {})  # plain SGD has none
            scalars = _scalar_states(state, view)
            for key, value in _shaped_states(state, view).items():
                if whole.get(key) is None:
                    whole[key] = torch.zeros_like(piece.flat.data, dtype=value.dtype)
                    self._masters.states_made()
                if value.untyped_storage().data_ptr() != whole[key].untyped_storage().data_ptr():
                    whole[key][begin:end].copy_(value)
        return scalars

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def state(self, names: Mapping[nn.Parameter, str], group: dist.ProcessGroup) -> Sequence[object]:
        """Return the cohorts for a checkpoint: names of parameters and scalars. Empty, without a message, if one only.

        Collective otherwise, because a rank has the scalars of its own shard only.
        """
        if len(self._cohorts) == 1:
            return []
        everyone = gather_objects([cohort.scalars for cohort in self._cohorts], group)
        state = []
        for cohort, *by_rank in zip(self._cohorts, *everyone, strict=True):
            merged = {index: scalars for of_rank in by_rank for index, scalars in of_rank.items()}
            state.append((sorted(names[param] for param in cohort.params), merged))
        return state

    def load(self, state: list[Any], names: Mapping[nn.Parameter, str]) -> None:
        """Restore what :meth:`state` has returned."""
        cohort_of = {name: number for number, (of_cohort, _) in enumerate(state) for name in of_cohort}
        cohorts = [_Cohort(set(), copy.deepcopy(scalars)) for _, scalars in state] or [_Cohort(set())]
        for param in self._params:
            cohorts[cohort_of.get(names[param], 0)].params.add(param)
        self._cohorts = cohorts
        self._frozen = None

    def states_at(self, param: nn.Parameter, index: int, flat: torch.Tensor) -> tuple[State, State]:
        """Return the states of ``param``, by element and the others; ``flat`` is the ``index``-th master tensor."""
        state = self._zero.optimizer.state.get(flat, {})
        if len(self._cohorts) == 1:
            return _shaped_states(state, flat), _scalar_states(state, flat)
        scalars = next(cohort.scalars for cohort in self._cohorts if param in cohort.params).get(index)
        return ({}, {}) if scalars is None else (_shaped_states(state, flat), scalars)

    def load_scalars(
        self,
        of_params: Mapping[nn.Parameter, State],
        index_of: Mapping[nn.Parameter, int],
        flats: Sequence[torch.Tensor],
    ) -> None:
        """Set the states that are not by element, of all parameters; no states: it was never stepped.

        ``index_of``: by parameter, the index of its master weights in ``flats``.
        """
        kinds: dict[str, _Cohort] = {}
        for param, scalars in of_params.items():
            values = {key: value.tolist() if torch.is_tensor(value) else value for key, value in scalars.items()}
            cohort = kinds.setdefault(repr(sorted(values.items())), _Cohort(set()))
            cohort.params.add(param)
            if scalars:
                cohort.scalars[index_of[param]] = scalars
        for index, flat in enumerate(flats):
            shared = (cohort.scalars.get(index) for cohort in kinds.values())
            self._zero.optimizer.state[flat].update(_copied(next(filter(None, shared), {})))
        kind_of = {param: kind for kind, cohort in kinds.items() for param in cohort.params}
        if len({(index, kind_of[param]) for param, index in index_of.items()}) == len(set(index_of.values())):
            self._cohorts = [_Cohort(set(self._params))]  # one kind in each master tensor
        else:
            self._cohorts = list(kinds.values())
        self._frozen = None


def _can_step_by_part(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` can step piece by piece without any hook or wrapper noticing."""
    own = vars(optimizer).get("step")
    return (
        type(optimizer) in STEPPED_BY_TENSOR
        and (own is None or hasattr(own, "_wrapped_by_lr_sched"))
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and not torch_optimizer._global_optimizer_pre_hooks
        and not torch_optimizer._global_optimizer_post_hooks
    )


def _whole(masters: Sequence[MasterShard]) -> StepSlices:
    return [(master.flat, [StepSlice(0, master.flat.numel(), None)]) for master in masters]


def _bounds_of(master: MasterShard, params: set[nn.Parameter]) -> Bounds:
    """Return the bounds of ``params`` in the master weights, with neighbours merged."""
    bounds: Bounds = []
    for param, begin, end in master.slices:
        if param in params:
            begin = bounds.pop()[0] if bounds and bounds[-1][1] == begin else begin
            bounds.append((begin, end))
    return bounds


def _enter(optimizer: torch.optim.Optimizer, piece: _Piece) -> list[nn.Parameter]:
    """Return views of the piece for the optimizer to step, with gradients and states."""
    views = []
    data, gradient = piece.flat.data, piece.flat.grad
    shaped = {} if piece.scalars is None else _shaped_states(optimizer.state[piece.flat], piece.flat)
    for begin, end in piece.bounds:
        view = nn.Parameter(data[begin:end])
        view.grad = None if gradient is None else gradient[begin:end]
        if piece.scalars is not None:
            optimizer.state[view] = {key: value[begin:end] for key, value in shaped.items()} | _copied(piece.scalars)
        views.append(view)
    return views


def _shaped_states(state: State, like: torch.Tensor) -> State:
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.shape == like.shape}


def _scalar_states(state: State, like: torch.Tensor) -> State:
    """Return the states whose shape is not that of ``like``."""
    shaped = _shaped_states(state, like)
    return {key: value for key, value in state.items() if key not in shaped}


def _copied(scalars: State) -> State:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for key, value in scalars.items()
    }
