"""Does an optimizer update each element by itself? Determined by stepping copies of it on the host.

ZeRO gives each rank flat pieces of the parameters. So one copy steps a few parameters as they are. Two more copies step
the same elements with the same gradients as two ranks of ZeRO would: each group as a flat tensor, cut in two. If the
results differ by more than rounding, each parameter must be whole on one rank. Then copies step each parameter alone;
if that differs, too, no rank can step its part.
"""

from __future__ import annotations

import copy
import enum
import io
import itertools
import pickle
import random
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class Scope(enum.Enum):
    """What the update of an element depends on."""

    ELEMENT = "its own values and gradients"
    PARAMETER = "the parameter that it is in"
    EVERYTHING = "all parameters"
    CHANCE = "random numbers"
    RANKS = "what other ranks send"
    UNKNOWN = "unknown"


class Dependence(NamedTuple):
    """What an optimizer's updates depend on. ``detail``, for an error: how much they differ, or why a trial failed."""

    scope: Scope
    detail: str = ""


# Tried first, because the states of a flat piece may grow with its square, as Shampoo's factors do.
_SMALL = ((8, 10), (6, 4, 3, 3), (37,))
# Above the thresholds of optimizers: factored states begin at 128 rows and columns, 8-bit states at 4096 elements.
_SHAPES = ((128, 160), (6, 4, 3, 3), (37,))
_MATRICES = ((128, 160), (160, 128))  # for optimizers that take only matrices
_CUT = 9001  # elements of the first rank (a third of small parameters); the cut is in mid-row
_SCALES = (1.0, 0.1, 10.0, 1.0, 100.0, 0.01, 1.0, 3.0)  # of the gradients by step, below and above limits on their norm
_LONGEST = 256  # most steps of a trial, for options that take effect in every k-th step
_LEARNING_RATE = 1e-2  # if the optimizer has none
_LARGEST_COPY = 1 << 20  # most elements of a tensor that an optimizer keeps outside of its states
# Allowed rounding: 100 operations in fp32, to which an optimizer may convert, relative to the largest update of a
# tensor; and a few operations per step in the parameter's own dtype.
_ROUNDING = 100 * torch.finfo(torch.float32).eps
_ROUNDING_OF_PARAMETERS = 4
# Share of a tensor's elements that may differ: at a sign or a clamp, the last bit can make a large difference.
_OUTLIERS = 0.01


_found: dict[Any, Dependence] = {}

Shapes = Sequence[tuple[int, ...]]
Tensors = list[Tensor]
Divide = Callable[[Tensors], list[Tensors]]
MakeTrial = Callable[[Shapes, torch.dtype, int], "_Trial"]


def probe(optimizer: torch.optim.Optimizer) -> Dependence:
    """Return what the updates of ``optimizer`` depend on, with the options of each of its groups.

    The optimizer is neither changed nor stepped; copies without its parameters, states and hooks are stepped. Random
    numbers, hooks on all optimizers and output do not change either. Learning rates do not matter. Results are cached
    by class and options.
    """
    key = _key(optimizer)
    if (found := _found.get(key)) is None:
        with _unnoticed():
            found = _probe(optimizer)
        if key is not None:
            _found[key] = found
    return found


def switches_weights(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` has ``train()`` and ``eval()``, which exchange the weights (schedule-free)."""
    return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))


def _probe(optimizer: torch.optim.Optimizer) -> Dependence:
    groups, counts = _groups(optimizer), sorted({len(_SCALES), _steps(optimizer)})
    found = _probe_groups(partial(_Trial, optimizer, [_TrialGroup(each.options, {}) for each in groups]), counts)
    if found.scope is Scope.UNKNOWN and any(each.state for each in groups):
        found = _probe_groups(partial(_Trial, optimizer, groups), counts)
        if found.scope is Scope.ELEMENT:
            return Dependence(Scope.PARAMETER, "its constructor makes states of each parameter")
    return found


def _probe_groups(trial: MakeTrial, counts: Sequence[int]) -> Dependence:
    """Return the finding of trials with each of these numbers of steps, ascending."""
    small, steps = _try(trial, _SMALL, torch.float64, counts)
    if small.scope in (Scope.EVERYTHING, Scope.CHANCE, Scope.RANKS):
        return small
    differs = ""
    if small.scope is Scope.PARAMETER:  # larger parameters may still depend on each other
        differs, counts = small.detail, [steps]
    unknown = None
    for shapes, dtype in itertools.product((_SHAPES, _MATRICES), (torch.float64, torch.float32)):
        found, _ = _try(trial, shapes, dtype, counts, differs)
        if found.scope is not Scope.UNKNOWN:
            return found
        unknown = unknown or found
    assert unknown is not None
    return unknown


def _try(
    trial: MakeTrial, shapes: Shapes, dtype: torch.dtype, counts: Sequence[int], differs: str = ""
) -> tuple[Dependence, int]:
    """Return the finding and its number of steps; the first difference ends the search."""
    for steps in counts:
        found = _try_steps(trial(shapes, dtype, steps), differs)
        if found.scope is not Scope.ELEMENT:
            break
    return found, steps


def _try_steps(trial: _Trial, differs: str) -> Dependence:
    """Return the finding of one trial. ``differs``: the difference of flat pieces, if already known."""
    try:
        whole = trial.run(lambda tensors: [tensors])
    except _MessageError as error:
        return Dependence(Scope.RANKS, str(error))
    except Exception as error:
        return Dependence(Scope.UNKNOWN, f"{type(error).__name__}: {error}")
    differs = differs or trial.difference(whole, _ranks, "flat pieces")
    if not differs:
        return Dependence(Scope.ELEMENT)
    if trial.drew_random_numbers:
        return Dependence(Scope.CHANCE, differs)
    each = trial.difference(whole, lambda tensors: [[tensor] for tensor in tensors], "one parameter")
    return Dependence(Scope.EVERYTHING, each) if each else Dependence(Scope.PARAMETER, differs)


# ---- a trial ---------------------------------------------------------------------------------------------------------


@dataclass
class _Trial:
    """Steps copies of ``optimizer`` on parameters of ``shapes``, the same in each of ``groups``."""

    optimizer: torch.optim.Optimizer
    groups: Sequence[_TrialGroup]
    shapes: Shapes
    dtype: torch.dtype
    steps: int
    drew_random_numbers: bool = False

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._start = self._values(generator)
        self._slope = self._values(generator)  # mean gradient: optimizers that adapt to the distance covered progress

    def run(self, divide: Divide) -> Tensors:
        """Step one copy for each part that ``divide`` makes of the parameters; return the results, flat, by group."""
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        before = _random_states()
        generator = torch.Generator().manual_seed(2)
        params = [[[nn.Parameter(each.clone()) for each in part] for part in divide(self._start)] for _ in self.groups]
        copies = [_copied(self.optimizer, self.groups, of_copy) for of_copy in zip(*params, strict=True)]
        switching = copies if switches_weights(self.optimizer) else []
        for each in switching:
            each.train()
        for step in range(self.steps):
            for parts in params:
                for part, gradients in zip(parts, divide(self._gradients(step, generator)), strict=True):
                    for param, gradient in zip(part, gradients, strict=True):
                        param.grad = gradient.clone()
            with _Alone():  # type: ignore[no-untyped-call]
                for each in copies:
                    each.step()
        for each in switching:
            each.eval()
        self.drew_random_numbers |= _random_states() != before
        return [_flat([param for part in parts for param in part]) for parts in params]

    def difference(self, whole: Tensors, divide: Divide, what: str) -> str:
        """Return how steps divided by ``divide`` differ from those of ``whole`` parameters; empty if they do not."""
        try:
            return self._difference(whole, self.run(divide))
        except Exception as error:
            return f"a step of {what} raises {type(error).__name__}: {error}"

    def _difference(self, whole: Tensors, divided: Tensors) -> str:
        """Return by how much the updates of a parameter differ beyond rounding; empty if none do."""
        sizes = [start.numel() for start in self._start]
        for ends, ends_divided in zip(whole, divided, strict=True):
            for start, end, other in zip(self._start, ends.split(sizes), ends_divided.split(sizes), strict=True):
                update, off = (end - start.reshape(-1)).abs(), (other - end).abs()
                rounding = _ROUNDING_OF_PARAMETERS * self.steps * torch.finfo(self.dtype).eps * (end.abs() + update)
                if (~(off <= rounding + _ROUNDING * update.max())).float().mean() > _OUTLIERS:
                    share = float(off.max() / update.max())
                    return f"{share:.1g} times the largest update of a parameter of shape {tuple(start.shape)}"
        return ""

    def _gradients(self, step: int, generator: torch.Generator) -> Tensors:
        scale = _SCALES[step % len(_SCALES)]
        drawn = zip(self._values(generator), self._slope, self._start, strict=True)
        gradients = [(scale * (noise + slope), start) for noise, slope, start in drawn]
        # Orthogonal in the first step, for optimizers that project their step onto the parameter's sphere.
        return [_orthogonal(gradient, start) if step == 0 else gradient for gradient, start in gradients]

    def _values(self, generator: torch.Generator) -> Tensors:
        """Return values with a different mean and norm in each row."""
        values = []
        for shape in self.shapes:
            rows = torch.randn(shape[0], *[1] * (len(shape) - 1), generator=generator, dtype=self.dtype).exp()
            values.append(rows * (torch.randn(shape, generator=generator, dtype=self.dtype) + 0.5))
        return values


def _ranks(tensors: Tensors) -> list[Tensors]:
    flat = _flat(tensors)
    cut = min(_CUT, flat.numel() // 3)
    return [[flat[:cut]], [flat[cut:]]]


def _random_states() -> bytes:
    """Return the comparable states of all random generators that an optimizer may draw from."""
    return pickle.dumps((torch.get_rng_state().numpy(), random.getstate(), numpy.random.get_state(legacy=False)))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _orthogonal(tensor: Tensor, to: Tensor) -> Tensor:
    """Return ``tensor`` without its component along ``to``: by row for kernels, else as a whole."""
    rows, others = (each.flatten(1) if each.dim() > 2 else each.reshape(1, -1) for each in (tensor, to))
    along = (rows * others).sum(1, keepdim=True) / others.square().sum(1, keepdim=True)
    return (rows - along * others).view_as(tensor)


def _steps(optimizer: torch.optim.Optimizer) -> int:
    """Return a number of steps that shows all effects of ``optimizer``, also of options for every k-th step."""
    options = [value for group in optimizer.param_groups for value in group.values()] + list(vars(optimizer).values())
    periods = [value for value in options if isinstance(value, int) and not isinstance(value, bool)]
    return max([3 * len(_SCALES)] + [period + 2 for period in periods if period <= _LONGEST])


# ---- copies ----------------------------------------------------------------------------------------------------------


class _TrialGroup(NamedTuple):
    options: dict[str, Any]
    state: dict[str, Any]  # what a constructor may set: a flag (Moonlight's Muon), the seed of a projection (APOLLO)


def _groups(optimizer: torch.optim.Optimizer) -> list[_TrialGroup]:
    """Return the groups that differ in more than the learning rate, as before a first step."""
    groups: dict[str, _TrialGroup] = {}
    states = getattr(optimizer, "state", {})
    in_groups = {id(param) for group in optimizer.param_groups for param in group["params"]}
    # States of parameters that DeepSpeed has replaced, in the groups, by flat ones. SPAM has others there, by name.
    replaced = [
        _noted(state) for param, state in states.items() if isinstance(param, Tensor) and id(param) not in in_groups
    ]
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name not in ("params", "step", "initial_lr")}
        if "step" in optimizer.defaults:
            options["step"] = optimizer.defaults["step"]
        if "lr" in options:
            rate = float(optimizer.defaults.get("lr") or _LEARNING_RATE)  # a scheduler may have set the group's to 0
            options["lr"] = torch.tensor(rate) if isinstance(options["lr"], Tensor) else rate
        noted = replaced or [_noted(states.get(param, {})) for param in group["params"]] or [{}]
        for state in noted:  # each kind once, of many parameters that a constructor may have numbered
            kind = {name: type(value) if _is_number(value) else value for name, value in state.items()}
            groups.setdefault(repr((options, kind)), _TrialGroup(options, state))
    return list(groups.values())


def _noted(state: Mapping[str, object]) -> dict[str, object]:
    stepped = any(isinstance(value, Tensor) for value in state.values())  # then numbers may be counts of steps
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, (bool, str)) or (_is_number(value) and not stepped)
    }


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class _MessageError(RuntimeError):
    """An operator of a trial would communicate; the text names it."""


class _Alone(TorchDispatchMode):
    """Forbids communication in a trial: other ranks may be at another point, or step other parameters."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise _MessageError(func.name())
        return func(*args, **(kwargs or {}))


class _CopySmallTensors(TorchFunctionMode):
    """Forbids copies of large tensors: an optimizer may keep a reference to a model."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func in (Tensor.__deepcopy__, Tensor.clone) and args[0].numel() > _LARGEST_COPY:
            raise ValueError(f"it keeps a tensor of shape {tuple(args[0].shape)} beside its parameters and states")
        return func(*args, **(kwargs or {}))


def _copied(optimizer: torch.optim.Optimizer, groups: Sequence[_TrialGroup], params: Sequence[Tensors]) -> Any:
    """Return a copy of ``optimizer`` with these groups and parameters, without other states and hooks."""
    made = [copy.deepcopy(each.options) | {"params": list(own)} for each, own in zip(groups, params, strict=True)]
    with _CopySmallTensors():
        twin = _twin(optimizer, made, {})
    for each, own in zip(groups, params, strict=True):
        for param in own if each.state else ():
            twin.state[param].update(each.state)
    return twin


def _twin(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], memo: dict[int, object]) -> Optimizer:
    """Return the copy. ``memo``, as of ``deepcopy()``, collects the copies of nested optimizers, too."""
    twin = object.__new__(type(optimizer))
    own = dict(vars(optimizer))
    own.pop("step", None)  # a scheduler has wrapped it
    memo[id(optimizer)] = twin
    replaced: list[tuple[Any, Any]] = [(own.get("param_groups"), groups), (own.get("state"), defaultdict(dict))]
    for group, new in zip(own.get("param_groups", ()), groups, strict=False):
        replaced += [(group, new), (group["params"], new["params"])]
    replaced += [(value, OrderedDict()) for name, value in own.items() if name.endswith("_hooks")]
    for old, new in replaced:
        memo.setdefault(id(old), new)
    for value in own.values():
        if isinstance(value, Optimizer) and id(value) not in memo:
            _twin(value, groups, memo)
    memo.pop(id(None), None)
    vars(twin).update(copy.deepcopy(own, memo))
    return twin


def _key(optimizer: torch.optim.Optimizer) -> object:
    """Return the class and the options, to cache by; ``None`` if the optimizer has other attributes."""
    simple = (bool, int, float, str, tuple, type(None))
    options = {name: value for name, value in vars(optimizer).items() if isinstance(value, simple)}
    known = {"defaults", "state", "param_groups", "step", *options}
    if any(name not in known and not name.endswith("_hooks") for name in vars(optimizer)):
        return None
    return type(optimizer), repr(options), repr(_groups(optimizer))


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Isolate a trial: nothing else in this process sees its effects."""
    global_hooks: Any = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    hooks = [dict(each) for each in global_hooks]
    state, state_of_numpy = random.getstate(), numpy.random.get_state()
    with (
        torch.random.fork_rng(devices=[]),
        _disable_current_modes(),  # as that of a plan's replay, which skips the arithmetic
        torch.enable_grad(),
        torch.device("cpu"),
        torch.compiler.set_stance("force_eager"),  # compiling takes longer than a trial
        warnings.catch_warnings(),
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        for each in global_hooks:
            each.clear()
        try:
            yield
        finally:
            random.setstate(state)
            numpy.random.set_state(state_of_numpy)
            for each, saved in zip(global_hooks, hooks, strict=True):
                each.update(saved)
