"""DeepSpeed's hooks on gradients and modules and its linear function for ZeRO-3, which ours replace.

A program may register hooks on a parameter's gradient at any time, for example to mask or log it. The gradient that
they leave is the one to reduce, so ours must run last. PyTorch runs the hooks of a tensor in the order of a dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from zerosync_strategy.core.engine import patches
from zerosync_strategy.core.engine.interpose import replaced

_DISABLED = "_torchdynamo_orig_callable"  # attribute of what torch.compiler.disable() returns


def remove(engine: Any) -> None:
    """Stop DeepSpeed's gathers for the modules of ``engine``, and make linear layers torch's own.

    DeepSpeed's linear layer is an autograd function for weights whose memory differs in the backward.
    """
    remove_hooks(engine.optimizer.parameter_offload)
    _use_plain_linear()
    for hooks, key in of_engine(engine):
        if not hasattr(hooks[key], _DISABLED):
            hooks[key] = torch.compiler.disable(hooks[key])  # keep the engine's hooks out of graphs


def made_again(engine: Any) -> bool:
    """Return whether a program has made DeepSpeed register its hooks again, as TRL does to generate."""
    return bool(engine.optimizer.parameter_offload.forward_hooks)


def make_anew(engine: Any) -> None:
    """Undo :func:`remove`."""
    from deepspeed.runtime.zero import parameter_offload

    offload = engine.optimizer.parameter_offload
    with replaced(offload, "module", engine.module):  # with several engines over one module, it is a part
        offload.setup_zero_stage3_hooks()
    parameter_offload.FWD_MODULE_STACK.pop()  # the model, which was pushed a second time
    for hooks, key in of_engine(engine):
        hooks[key] = getattr(hooks[key], _DISABLED, hooks[key])


def of_engine(engine: Any) -> Iterator[tuple[dict[int, Any], int]]:
    """Yield the dictionary and key of each of the engine's own hooks around a forward."""
    for handle in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
        if handle is not None and (hooks := handle.hooks_dict_ref()) is not None and handle.id in hooks:
            yield hooks, handle.id


def remove_hooks(offload: Any) -> None:
    offload._remove_module_hooks()
    offload.forward_hooks.clear()


def _use_plain_linear() -> None:
    """Replace the code of DeepSpeed's linear function, because programs refer to the function object."""
    from deepspeed.runtime.zero import linear

    def zero3_linear_wrap(input: Any, weight: Any, bias: Any = None) -> Any:
        return torch._C._nn.linear(input, weight, bias)

    if patches.is_installed(patches.LINEAR):
        return
    function: Any = linear.zero3_linear_wrap
    stock, function.__code__ = function.__code__, zero3_linear_wrap.__code__

    def undo() -> None:
        function.__code__ = stock

    patches.install(patches.LINEAR, undo)
    patches.replace(patches.TORCHS_LINEAR, lambda found: torch._C._nn.linear if found is function else found)


def drop_functions(module: Any) -> None:
    """Make DeepSpeed create new autograd functions when it next registers hooks on ``module`` and its submodules.

    Each gathers by the engine for which it was made, but DeepSpeed 0.19.8 reuses it for later engines.
    """
    for submodule in module.modules():
        for name in ("pre_bwd_fn", "post_bwd_fn"):
            vars(submodule).pop(name, None)


def leave_sharded(engine: Any) -> None:
    """Destroy ``engine`` but leave the parameters of its module sharded, so that another engine may train it."""
    engine.destroy()
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()


class GradientHooks:
    """One hook on each of ``params``, until :meth:`remove`, in place of DeepSpeed's on parameters and leaf modules."""

    def __init__(self, optimizer: Any, hooks: Iterable[tuple[Any, Callable[[Any], None]]]) -> None:
        stock = [*optimizer._grad_acc_hooks, *getattr(optimizer, "_leaf_module_hooks", ())]
        self._stock = [
            (of, handle.id, of.pop(handle.id)) for handle in stock if handle.id in (of := handle.hooks_dict_ref() or {})
        ]
        self._handles = [_register(param, hook) for param, hook in hooks]
        self._of_params = [(handle.id, handle.hooks_dict_ref()) for handle in self._handles]
        self._dicts = [of for _, of in self._of_params]
        self._orders: list[tuple[int, ...]] = []  # after the last run_last()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for of, key, hook in self._stock:
            of[key] = hook

    def run_last(self) -> bool:
        """Make these hooks run after all hooks of the program from now on; return whether some did not."""
        if list(map(tuple, self._dicts)) == self._orders:  # three calls for all parameters
            return False
        moved = False
        for own_key, of in self._of_params:
            own = [key for key, hook in of.items() if key == own_key or _is_ours(hook)]
            if list(of)[-len(own) :] != own:
                moved = True
                for key in own:  # C reads the order of insertion, which OrderedDict.move_to_end() does not change
                    of[key] = of.pop(key)
        self._orders = list(map(tuple, self._dicts))
        return moved


def _register(param: Any, hook: Callable[[Any], None]) -> Any:
    requires_grad = param.requires_grad  # it may be frozen for a while
    param.requires_grad_(True)
    handle = param.register_post_accumulate_grad_hook(hook)
    param.requires_grad_(requires_grad)
    return handle


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("zerosync_strategy.")
