"""DeepSpeed's autograd functions of ZeRO-3, called for less."""

from __future__ import annotations

from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from zerosync_strategy.core.engine import patches


def use_quick_linear() -> None:
    """Let ZeRO-3's linear layers cost the host less.

    A layer whose weight is held is torch's own: ZeRO-3's autograd function is there for weights that are released
    before their backward.
    """
    patches.replace(patches.LINEAR, _linear)


def _linear(stock: Callable[..., Any]) -> Any:
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

    in_zero3 = _quick(LinearFunctionForZeroStage3)

    def apply(input: torch.Tensor, weight: Any, bias: Any = None) -> Any:
        # The same in a forward and where activation checkpointing runs it again, which has to save as many tensors:
        # also of a weight that is still on its way.
        if not torch.compiler.is_compiling():
            record = getattr(weight, "_zerosync_record", None)
            if record is not None and record.linear_is_plain:
                return torch._C._nn.linear(input, weight, bias)
            if has_torch_function((weight, bias)):  # the function would save it as it is, and checkpointing empty
                return handle_torch_function(apply, (weight, bias), input, weight, bias)
        return in_zero3(input, weight, bias)

    return staticmethod(apply)


def give_own(module: Any) -> None:
    """Give ``module`` its own of these functions, where DeepSpeed has found another's on it and made none.

    Before it looked into ``__dict__``, it took a wrapper that passes attributes on to a module inside of it, as PEFT's
    ``modules_to_save``, for one that has them: the wrapper's backward would be counted for the module inside.
    """
    for name in _NAMES:
        if name not in vars(module) and (found := getattr(module, name, None)) is not None:
            setattr(module, name, _bound_to(module, found))
            module.applied_pre_backward_ref_cnt = 0


def _bound_to(module: Any, function: Any) -> Any:
    """Return ``function``, which DeepSpeed has made for another module, as it would have made it for ``module``."""

    def rebound(method: FunctionType) -> FunctionType:
        names, cells = method.__code__.co_freevars, method.__closure__ or ()
        closure = tuple(CellType(module) if name == "module" else cell for name, cell in zip(names, cells, strict=True))
        return FunctionType(method.__code__, method.__globals__, method.__name__, method.__defaults__, closure)

    members = {
        name: staticmethod(rebound(member.__func__))
        for name, member in vars(function).items()
        if isinstance(member, staticmethod) and isinstance(member.__func__, FunctionType) and name != "apply"
    }
    return type(function)(function.__name__, (torch.autograd.Function,), members)


def quicken(module: Any) -> None:
    """Let the autograd functions by which DeepSpeed finds where the backward of ``module`` is cost the host less."""
    for function in _functions(module):
        if "apply" not in vars(function):
            function.apply = staticmethod(_quick(function))


def undo_quicken(module: Any) -> None:
    """Undo :func:`quicken`."""
    for function in _functions(module):
        if "apply" in vars(function):
            del function.apply


def drop_functions(module: Any) -> None:
    """Let DeepSpeed make these autograd functions anew, with the hooks of its next engine on ``module`` and inside it.

    They gather by the engine for which they were made, and DeepSpeed 0.19.8 would use them for every later one: its
    backwards would know nothing of that engine's order, held parameters and streams.
    """
    for submodule in module.modules():
        for name in _NAMES:
            vars(submodule).pop(name, None)


_NAMES = ("pre_bwd_fn", "post_bwd_fn")


def _functions(module: Any) -> list[Any]:
    return [vars(module)[name] for name in _NAMES if vars(module).get(name) is not None]


def _quick(function: Any) -> Callable[..., Any]:
    """Return ``function.apply`` without a search for default arguments, which costs more than the rest.

    It is given all its arguments, and no tensor of functorch's.
    """
    stock, plain = function.apply, super(torch.autograd.Function, function).apply

    def apply(*args: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return stock(*args)
        return plain(*args)

    return apply
