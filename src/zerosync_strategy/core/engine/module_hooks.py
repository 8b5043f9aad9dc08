"""DeepSpeed's hooks on modules and its linear function for ZeRO-3, which ours replace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from zerosync_strategy.core.engine import patches
from zerosync_strategy.core.engine.interpose import replaced

_DISABLED = "_torchdynamo_orig_callable"  # attribute of what torch.compiler.disable() returns


def remove(engine: Any) -> None:
    """Stop DeepSpeed's gathers for the modules of ``engine``, and make linear layers torch's own.

    DeepSpeed's linear layer is an autograd function for weights whose memory differs in the backward.
    """
    _remove(engine.optimizer.parameter_offload)
    _use_plain_linear()
    for hooks, key in _of_engine(engine):
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
    for hooks, key in _of_engine(engine):
        hooks[key] = getattr(hooks[key], _DISABLED, hooks[key])


def _of_engine(engine: Any) -> Iterator[tuple[dict[int, Any], int]]:
    """Yield the dictionary and key of each of the engine's own hooks around a forward."""
    for handle in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
        if handle is not None and (hooks := handle.hooks_dict_ref()) is not None and handle.id in hooks:
            yield hooks, handle.id


def _remove(offload: Any) -> None:
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


def drop_functions(module: Any) -> None:
    """Make DeepSpeed create new autograd functions when it next registers hooks on ``module`` and its submodules.

    Each gathers by the engine for which it was made, but DeepSpeed 0.19.8 reuses it for later engines.
    """
    for submodule in module.modules():
        for name in ("pre_bwd_fn", "post_bwd_fn"):
            vars(submodule).pop(name, None)


def unwrap_compiled(engine: Any) -> None:
    """Replace the wrappers that ``torch.compile(module)`` made before ``deepspeed.initialize`` by the modules inside.

    They stay compiled, as by ``module.compile()``. A wrapper forwards attributes that are set on it to the module
    inside, so DeepSpeed 0.19.8 confuses the two: it gives the module the wrapper's own empty dictionary of parameters,
    the wrapper none, and both one set of backward hooks. Without wrappers, nothing changes.
    """

    def unwrap(module: Any) -> Any:
        while (inside := vars(module)["_modules"].get("_orig_mod")) is not None:
            inside._compiled_call_impl = module.dynamo_ctx(inside._call_impl)
            module = inside
        return module

    if all(unwrap(module) is module for module in engine.module.modules()):
        return
    optimizer, offload = engine.optimizer, engine.optimizer.parameter_offload
    begins, ends = (hooks[key] for hooks, key in _of_engine(engine))
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    _remove(offload)
    for parent in list(engine.module.modules()):
        for name, child in vars(parent)["_modules"].items():
            if child is not None:
                vars(parent)["_modules"][name] = unwrap(child)
    module = engine.module = optimizer.module = offload.module = unwrap(engine.module)
    vars(engine)["module"] = module  # DeepSpeed puts it here, too, and older releases read it here
    for param, name in engine.param_names.items():
        engine.param_names[param] = name.replace("_orig_mod.", "")
        owner, _, name = engine.param_names[param].rpartition(".")
        module.get_submodule(owner)._parameters.setdefault(name, param)
        param._z3_optimizer = optimizer  # older releases set it only on parameters of the wrapper
    for submodule in module.modules():
        _gather_when_read(submodule)
    drop_functions(module)
    engine.module_forward_pre_hook = module.register_forward_pre_hook(begins, with_kwargs=True)
    engine.module_forward_post_hook = module.register_forward_hook(ends)
    offload.setup_zero_stage3_hooks()


def _gather_when_read(module: Any) -> None:
    """Put the parameters of ``module`` into ZeRO-3's dictionary, if they are not."""
    from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict

    if not isinstance(module._parameters, ZeROOrderedDict):
        found = ZeROOrderedDict(parent_module=module)
        found.update(module._parameters)
        module._parameters = found
