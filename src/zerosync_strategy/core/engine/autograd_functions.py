"""DeepSpeed's autograd functions of ZeRO-3, called for less."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function


@functools.cache
def use_quick_linear() -> None:
    """From now on in this process, ZeRO-3's linear layers cost the host less.

    A layer whose weight is held is torch's own: ZeRO-3's autograd function is there for weights that are released
    before their backward.
    """
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

    quicken(LinearFunctionForZeroStage3)
    in_zero3 = LinearFunctionForZeroStage3.apply

    def apply(input: torch.Tensor, weight: Any, bias: Any = None) -> Any:
        # The same in a forward and where activation checkpointing runs it again, which has to save as many tensors:
        # also of a weight that is still on its way.
        if not torch.compiler.is_compiling():
            if getattr(weight, "_zerosync_kept", False):
                return torch._C._nn.linear(input, weight, bias)
            if has_torch_function((weight, bias)):  # the function would save it as it is, and checkpointing empty
                return handle_torch_function(apply, (weight, bias), input, weight, bias)
        return in_zero3(input, weight, bias)

    LinearFunctionForZeroStage3.apply = staticmethod(apply)


def quicken_module_functions(module: Any) -> None:
    """:func:`quicken` the autograd functions by which DeepSpeed finds where the backward of ``module`` is."""
    for name in ("pre_bwd_fn", "post_bwd_fn"):
        if (function := vars(module).get(name)) is not None:
            quicken(function)


def quicken(function: Any) -> None:
    """Let an autograd function be called without a search for default arguments, which costs more than the rest.

    It is given all its arguments, and no tensor of functorch's.
    """
    if "apply" in vars(function):
        return
    stock, plain = function.apply, super(torch.autograd.Function, function).apply

    def apply(*args: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return stock(*args)
        return plain(*args)

    function.apply = staticmethod(apply)
