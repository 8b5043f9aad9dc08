"""The torch optimizer's step, part by part instead of all master weights at once.

The optimizer is given views of its flat master weights, with views of its own states, and scalar states (as Adam's
``step``) of their own. So parts can be left out or be at another count of steps (``frozen.py``); and the parameters of
a part are gathered while the next is stepped, whose temporary tensors are small.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim import SGD, Adadelta, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop
from torch.optim import optimizer as torch_optimizer

State = dict[str, Any]
Scalars = dict[int, State]
"""Of elements that were stepped together, by index of their master weights: the states that are not of their shape."""
# What they do in a step is the sum of what they do to each tensor. Another class may count steps by group.
STEPPED_BY_TENSOR = frozenset([SGD, Adadelta, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop])


class Part(NamedTuple):
    """What one call of the optimizer's step is for."""

    master: int  # number of the master weights, as the caller counts them
    runs: list[tuple[int, int]]  # where its elements begin and end in them, ascending; may be none
    scalars: Scalars  # of its elements, if they were stepped before; the step puts those after it here
    stepped: Callable[[], None] | None = None  # called when they are stepped


def can_step_by_part(optimizer: Any) -> bool:
    """Return whether nobody can tell from outside of ``optimizer`` that a step was made part by part."""
    own = vars(optimizer).get("step")
    return (
        type(optimizer) in STEPPED_BY_TENSOR
        and (own is None or hasattr(own, "_wrapped_by_lr_sched"))
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and not torch_optimizer._global_optimizer_pre_hooks
        and not torch_optimizer._global_optimizer_post_hooks
    )


@contextmanager
def stepping_by_part(
    optimizer: Any, parts: Callable[[Any], Iterable[Part]], states_made: Callable[[], None]
) -> Iterator[None]:
    """While active, ``step()`` of a torch optimizer steps parts of its master weights, one after the other.

    Args:
        parts: returns those of a flat tensor of master weights, with gradients.
        states_made: is called when the optimizer has made states after its first step.
    """
    stock, own = optimizer.step, vars(optimizer).get("step")  # a learning-rate scheduler sets one on the instance
    # What counts calls of step() counts one.
    again = type(optimizer).step.__wrapped__.__get__(optimizer) if can_step_by_part(optimizer) else stock

    def step(*_: Any, **__: Any) -> None:
        groups = [(group, group["params"]) for group in optimizer.param_groups]
        work = [(group, flat, part) for group, flats in groups for flat in flats for part in parts(flat)]
        before = {(id(part.scalars), part.master): part.scalars.get(part.master) for _, _, part in work}
        last = max((number for number, (_, _, part) in enumerate(work) if part.runs), default=-1)
        try:
            for group, _ in groups:
                group["params"] = []
            for number, (group, flat, part) in enumerate(work):
                if part.runs:
                    views = _enter(optimizer, flat, part.runs, before[id(part.scalars), part.master])
                    group["params"] = views
                    stock() if number == last else again()
                    group["params"] = []
                    part.scalars[part.master] = _leave(optimizer, flat, part.runs, views, states_made)
                if part.stepped is not None:
                    part.stepped()
        finally:
            for group, flats in groups:
                group["params"] = flats

    optimizer.step = step
    try:
        yield
    finally:
        del optimizer.step
        if own is not None:
            optimizer.step = own


def _enter(optimizer: Any, flat: Any, runs: list[tuple[int, int]], scalars: State | None) -> list[torch.nn.Parameter]:
    """Return views of ``flat`` for the optimizer to step, with their gradients and states."""
    views = []
    data, gradient = flat.data, flat.grad
    shaped = {} if scalars is None else shaped_states(optimizer.state[flat], flat)
    for begin, end in runs:
        view = torch.nn.Parameter(data[begin:end])
        view.grad = gradient[begin:end]
        if scalars is not None:
            own = {key: value[begin:end] for key, value in shaped.items()}
            optimizer.state[view] = own | copied(scalars)
        views.append(view)
    return views


def _leave(
    optimizer: Any, flat: Any, runs: list[tuple[int, int]], views: list[Any], states_made: Callable[[], None]
) -> State:
    """Take the states of the ``views`` after their step; return those that are not of their shape."""
    whole, scalars = optimizer.state[flat], {}
    for view, (begin, end) in zip(views, runs, strict=True):
        state = optimizer.state.pop(view, {})  # plain SGD has none
        scalars = scalar_states(state, view)
        for key, value in shaped_states(state, view).items():
            if whole.get(key) is None:
                whole[key] = torch.zeros_like(flat.data, dtype=value.dtype)
                states_made()
            if value.untyped_storage().data_ptr() != whole[key].untyped_storage().data_ptr():
                whole[key][begin:end].copy_(value)
    return scalars


def shaped_states(state: State, like: torch.Tensor) -> State:
    """Return the states of the shape of ``like``."""
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.shape == like.shape}


def scalar_states(state: State, like: torch.Tensor) -> State:
    """Return the states of another shape than that of ``like``."""
    shaped = shaped_states(state, like)
    return {key: value for key, value in state.items() if key not in shaped}


def copied(scalars: State) -> State:
    """Return a copy, which another step may change."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for key, value in scalars.items()
    }
