"""What an optimizer must be for ZeRO, where each rank steps some of the elements, or some of the parameters."""

from __future__ import annotations

import gc
import inspect
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, combinations
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from zerosync_strategy.core.engine import compat, zero3
from zerosync_strategy.core.engine.zero import listed
from zerosync_strategy.core.optimizer.probe import Dependence, Scope, probe
from zerosync_strategy.core.optimizer.stepper import STEPPED_BY_TENSOR
from zerosync_strategy.core.options import WHOLE

_WHOLE_TENSORS = frozenset({
    "adafactor", "adalomo", "adamini", "adammini", "adamp", "apollo", "came", "galore", "kron", "lamb", "larc", "lars",
    "lomo", "muon", "novograd", "psgd", "sgdp", "shampoo", "sm3", "soap", "stableadam", "swats",
})  # fmt: skip
_ALL_PARAMETERS = frozenset({"dadapt", "lbfgs", "prodigy"})
_REMEDY = (
    "Use AdamW, SGD or another first-order optimizer that updates each parameter by itself. If you know that this one"
    " does, set ZeroSync's option elementwise_optimizer=True where it updates each element by itself, and 'whole' where"
    " it needs whole parameters."
)
_WRONG = "but ZeRO gives each rank some of the parameters, so that its steps would be wrong."
_FOUND = {
    Scope.EVERYTHING: "computes with all parameters at once",
    Scope.CHANCE: "draws random numbers, which ranks would draw alike for different elements",
}
# Known to be elementwise, by package. Their code is compiled for a GPU, or when they are made: no trial on the host can
# run it.
_ELEMENTWISE = {
    "apex": r"Fused(Adam|SGD|Adagrad)",
    "bitsandbytes": r"(Paged)?(Adam|AdamW|AdEMAMix|Lion|RMSprop|SGD)(8bit|32bit)?",
    "deepspeed": r"FusedAdam|FusedLion|DeepSpeedCPU(Adam|Adagrad|Lion)",
    "transformer_engine": r"Fused(Adam|SGD)",
}
# Attributes of schedulers with a value for each group.
_BY_GROUP = (
    "base_lrs", "lr_lambdas", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums",
)  # fmt: skip
# Optimizers whose parameters an engine has replaced by flat shards.
_used: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def optimizer_problem(module: torch.nn.Module, optimizer: Any, elementwise: bool | str = False) -> str:
    """Return why ZeRO cannot train ``module`` with ``optimizer``; empty if it can.

    Called before DeepSpeed gets the optimizer. Any other object with parameters in ``params``, as Accelerate's
    ``DummyOptim``, stands for an optimizer that DeepSpeed makes. ``elementwise`` is the user's option: the optimizer
    updates each element by itself, or needs ``"whole"`` parameters.
    """
    if any(inner in _used for inner in _unwrapped(optimizer)):
        return (
            f"the optimizer {type(optimizer).__name__} has been given to an engine before, and has ZeRO's flat shards"
            " in place of its parameters. Make a new optimizer for each engine."
        )
    kind = kind_of(optimizer, elementwise)
    return kind.problem or foreign_problem(module, list(_groups(optimizer))) or dtype_problem(module)


class Kind(NamedTuple):
    """How ZeRO can use an optimizer.

    Attributes:
        problem: why no rank can step its part of the parameters with it; empty if it can.
        needs_whole: it must step parameters in their shapes, each on one rank.
    """

    problem: str
    needs_whole: bool = False


def kind_of(optimizer: torch.optim.Optimizer, elementwise: bool | str = False) -> Kind:
    """Return the kind of ``optimizer``, by a trial if its class is not known. See :func:`optimizer_problem`."""
    problem = _known_problem(optimizer, elementwise)
    if problem or elementwise:
        return Kind(problem, elementwise == WHOLE)
    if _is_elementwise(optimizer):
        return Kind("")
    found = probe(optimizer)
    # A class may treat large parameters in ways that small ones do not show.
    needs_whole = found.scope is Scope.PARAMETER or _is_known(optimizer, _WHOLE_TENSORS) is not None
    return Kind(_found_problem(optimizer, found), needs_whole)


def _known_problem(optimizer: torch.optim.Optimizer, elementwise: bool | str) -> str:
    """Return a problem that the class is known to have; empty if none."""
    if not elementwise and (cls := _is_known(optimizer, _ALL_PARAMETERS)):  # a trial of some would need a GPU
        return f"the optimizer {_named(optimizer, cls)} {_FOUND[Scope.EVERYTHING]}, {_WRONG} {_REMEDY}"
    for inner in _unwrapped(optimizer):
        if isinstance(inner, torch.optim.Adagrad):
            return (
                f"the optimizer {_named(optimizer, torch.optim.Adagrad)} is replaced by DeepSpeed with one of its own,"
                " which has the defaults in place of each group's options, and which no scheduler of learning rates"
                " would reach. Use AdamW or RMSprop."
            )
        step = getattr(type(inner), "step", None)
        if inspect.isfunction(step) and inspect.unwrap(step) is inspect.unwrap(torch.optim.Optimizer.step):
            return (
                f"the optimizer {type(inner).__name__} has no step(): it updates parameters in the backward, by each"
                " rank's own gradients, as LOMO does. Use AdamW, or where memory is short SGD or Adafactor: states"
                " are divided among the ranks."
            )
        closure = inspect.signature(step).parameters.get("closure") if inspect.isfunction(step) else None
        if closure is not None and closure.default is closure.empty:
            return (
                f"the optimizer {type(inner).__name__} takes a closure in step(), but ZeRO steps it without one. Let"
                " the closure be optional: 'def step(self, closure=None)'."
            )
    return ""


def _is_known(optimizer: torch.optim.Optimizer, names: frozenset[str]) -> type | None:
    """Return the class of ``optimizer``, or a base class, with one of ``names`` among the words of its name."""
    classes = (cls for inner in _unwrapped(optimizer) for cls in type(inner).__mro__)
    return next((cls for cls in classes if _words(cls.__name__) & names), None)


def _is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the class is known to be elementwise, or DeepSpeed is yet to make the optimizer."""
    cls = type(optimizer)
    names = _ELEMENTWISE.get(cls.__module__.partition(".")[0], "")
    is_made = hasattr(optimizer, "step") and hasattr(optimizer, "param_groups")
    return not is_made or cls in STEPPED_BY_TENSOR or re.fullmatch(names, cls.__name__) is not None


def _found_problem(optimizer: torch.optim.Optimizer, found: Dependence) -> str:
    scope, detail = found
    if scope in (Scope.ELEMENT, Scope.PARAMETER):
        return ""
    name = type(optimizer).__name__
    if scope is Scope.UNKNOWN:
        return (
            f"the optimizer {name} could not step a copy of itself on small parameters: {detail}. So nothing says"
            f" whether each rank may step its part of the parameters. {_REMEDY}"
        )
    if scope is Scope.RANKS:
        return (
            f"the optimizer {name} exchanges with other ranks in its step ({detail}), where each rank has other"
            " parameters: it would wait for ever, or mix them up. Use its form for one process, such as"
            " SingleDeviceMuonWithAuxAdam in place of MuonWithAuxAdam: what other ranks need, ZeroSync sends."
        )
    return (
        f"the optimizer {name} {_FOUND[scope]}, {_WRONG} A copy that stepped small parameters as two flat pieces did"
        f" otherwise than one that stepped them whole: {detail}. {_REMEDY}"
    )


def _problem(what: str, found: Sequence[str], why: str) -> str:
    return f"{what}: {listed(found)}. {why}" if found else ""


def dtype_problem(module: torch.nn.Module) -> str:
    """Return which parameters of ``module`` have a dtype that ZeRO cannot train; empty if none."""
    return _problem(
        "parameters are complex", [name for name, param in module.named_parameters() if param.is_complex()],
        "ZeRO's flat shards are real and drop the imaginary parts, and DeepSpeed makes a whole parameter group complex"
        " where one is. Keep them as real parameters with a last dimension of 2, and use torch.view_as_complex() in"
        " forward().",
    )  # fmt: skip


def embedding_problem(module: torch.nn.Module) -> str:
    """Return which embeddings of ``module`` ZeRO cannot train as they are; empty if none."""
    found = [
        (name or type(module).__name__, each)
        for name, each in module.named_modules()
        if isinstance(each, (torch.nn.Embedding, torch.nn.EmbeddingBag))
    ]
    return _problem(
        "embeddings have max_norm", [name for name, each in found if each.max_norm is not None],
        "In each forward it scales the rows that this rank's batch uses, so that ranks would come to differ. Leave"
        " max_norm out, and scale all rows alike between steps: 'with zerosync.full_parameters():"
        " weight.data.copy_(weight.data.renorm(2, 0, max_norm))'.",
    ) or _problem(
        "embeddings have sparse=True", [name for name, each in found if each.sparse and each.weight.requires_grad],
        "Their gradients are sparse, and ZeRO's shards are dense. Leave sparse=True out, and use an optimizer for"
        " dense gradients: SGD makes the same steps, Adam also moves rows that a batch does not use.",
    )  # fmt: skip


def shared_memory_problem(module: torch.nn.Module) -> str:
    """Return which parameters of ``module`` shared memory when DeepSpeed got them; empty if none are known."""
    pairs = [
        f"{first!r} and {second!r}" if first != second else f"{first!r} with itself"
        for first, second in compat.sharing(module)
    ]
    return _problem(
        "tensors share memory", pairs,
        "ZeRO gives each parameter memory of its own, so that what is written to one would not reach the other. Let the"
        " modules have one nn.Parameter ('b.weight = a.weight', not 'b.weight.data = a.weight.data'), or give each a"
        " copy.",
    )  # fmt: skip


def mark_used(optimizer: torch.optim.Optimizer) -> None:
    """Remember that an engine has replaced the parameters of ``optimizer``."""
    _used.add(optimizer)


def foreign_problem(module: torch.nn.Module, groups: Sequence[Sequence[torch.Tensor]]) -> str:
    """Return which parameters of an optimizer's ``groups`` are not in ``module``; empty if none."""
    own = {id(param) for param in module.parameters()}
    foreign = [
        f"number {index} of group {group} with shape {zero3.full_shape(param)}"
        for group, params in enumerate(groups)
        for index, param in enumerate(params)
        if id(param) not in own
    ]
    return _problem(
        f"the optimizer has parameters that are not in the {type(module).__name__}", foreign,
        "Make each an nn.Parameter of the module, or of a module in it, before the optimizer is made.",
    )  # fmt: skip


def _unwrapped(optimizer: object) -> Iterator[object]:
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


def _groups(optimizer: object) -> Iterator[list[torch.Tensor]]:
    groups: Iterable[Any] | None = getattr(optimizer, "param_groups", None)
    if groups is None:
        params = getattr(optimizer, "params", ())
        if not isinstance(params, (list, tuple)):
            return  # a generator: DeepSpeed must be the first to read it
        groups = params if params and isinstance(params[0], dict) else [{"params": list(params)}]
    for group in groups:
        params = group["params"]
        yield [params] if isinstance(params, torch.Tensor) else list(params)


def _named(optimizer: object, cls: type) -> str:
    name = type(optimizer).__name__
    return name if type(optimizer) is cls else f"{name}, a kind of {cls.__name__},"


def _words(name: str) -> set[str]:
    """Return the words of a class name, and all joins of neighbouring words, in lower case."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)
    return {text.lower() for first in range(len(words)) for text in accumulate(words[first:])}


def drop_empty_groups(optimizer: Any) -> None:
    """Remove empty groups from an optimizer, as DeepSpeed does, and from the schedulers of its learning rates."""
    groups = getattr(optimizer, "param_groups", [])  # none if DeepSpeed is yet to make the optimizer
    kept, number = [index for index, group in enumerate(groups) if group["params"]], len(groups)
    if len(kept) == number:
        return
    groups[:] = [groups[index] for index in kept]
    for scheduler in _schedulers(optimizer):
        vars(scheduler).update(_only(_by_group(scheduler, number), kept))


def take_out_dropped_groups(optimizer: torch.optim.Optimizer) -> str:
    """Remove groups that DeepSpeed has dropped, as they were empty, from each scheduler of ``optimizer``.

    Return a problem if a scheduler does not say which; empty if none has.
    """
    groups = optimizer.param_groups
    if not any("initial_lr" in group for group in groups):
        return ""  # no scheduler was made, or one of a plateau, which looks at the number of groups itself
    for scheduler in _schedulers(optimizer):
        number = max((len(vars(scheduler).get(name, ())) for name in _BY_GROUP), default=0)
        if number <= len(groups):
            continue
        lists = _by_group(scheduler, number)
        choices = [
            _only(lists, kept)
            for kept in combinations(range(number), len(groups))
            if "base_lrs" not in lists
            or all(lists["base_lrs"][old] == group["initial_lr"] for old, group in zip(kept, groups, strict=True))
        ]
        if not choices or any(choice != choices[0] for choice in choices):
            return (
                f"the scheduler {type(scheduler).__name__} was made for {number} groups of the optimizer, of which"
                f" DeepSpeed has kept the {len(groups)} that have parameters, and its rates do not say which. Leave"
                " empty groups out, or make the scheduler after deepspeed.initialize()."
            )
        vars(scheduler).update(choices[0])
    return ""


def _schedulers(optimizer: torch.optim.Optimizer) -> Iterator[LRScheduler]:
    """Yield the schedulers of ``optimizer``; the program may step them, and then nothing else refers to them."""
    for each in gc.get_objects():
        if issubclass(type(each), LRScheduler) and getattr(each, "optimizer", None) is optimizer:
            yield each


def _by_group(scheduler: LRScheduler, number: int) -> dict[str, list[object]]:
    """Return the attributes of ``scheduler`` that have a value for each of so many groups."""
    lists = {name: vars(scheduler).get(name) for name in _BY_GROUP}
    return {name: values for name, values in lists.items() if isinstance(values, list) and len(values) == number}


def _only(lists: dict[str, list[object]], kept: Sequence[int]) -> dict[str, list[object]]:
    return {name: [values[index] for index in kept] for name, values in lists.items()}
