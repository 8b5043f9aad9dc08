"""What DeepSpeed puts around the modules and linear layers of a model for ZeRO-3, which ours take the place of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from zerosync_strategy.core.engine import patches
from zerosync_strategy.core.engine.interpose import replaced

_DISABLED = "_torchdynamo_orig_callable"  # on what torch.compiler.disable() returns


def remove(engine: Any) -> None:
    """Let DeepSpeed gather for no module of ``engine``, and a linear layer be torch's own.

    DeepSpeed's linear layer is an autograd function, there for weights whose memory is another in the backward.
    """
    _remove(engine.optimizer.parameter_offload)
    _use_plain_linear()
    for hooks, key in _of_engine(engine):
        if not hasattr(hooks[key], _DISABLED):
            hooks[key] = torch.compiler.disable(hooks[key])  # what the engine does around a forward is in no graph


def made_again(engine: Any) -> bool:
    """Return whether a program, as TRL's when it generates, has let DeepSpeed make its hooks anew."""
    return bool(engine.optimizer.parameter_offload.forward_hooks)


def make_anew(engine: Any) -> None:
    """Undo :func:`remove`."""
    from deepspeed.runtime.zero import parameter_offload

    offload = engine.optimizer.parameter_offload
    with replaced(offload, "module", engine.module):  # of several engines over one module, it has a part
        offload.setup_zero_stage3_hooks()
    parameter_offload.FWD_MODULE_STACK.pop()  # the model, which is there already
    for hooks, key in _of_engine(engine):
        hooks[key] = getattr(hooks[key], _DISABLED, hooks[key])


def _of_engine(engine: Any) -> Iterator[tuple[dict[int, Any], int]]:
    """Yield where each of the engine's own hooks around a forward is, and by which key."""
    for handle in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
        if handle is not None and (hooks := handle.hooks_dict_ref()) is not None and handle.id in hooks:
            yield hooks, handle.id


def _remove(offload: Any) -> None:
    offload._remove_module_hooks()
    offload.forward_hooks.clear()


def _use_plain_linear() -> None:
    """Programs have the function by ``torch.nn.functional.linear``: it stays the same object and gets other code."""
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
    """Let DeepSpeed make its autograd functions anew, with the hooks of its next engine on ``module`` and inside it.

    They gather by the engine for which they were made, and DeepSpeed 0.19.8 would use them for every later one.
    """
    for submodule in module.modules():
        for name in ("pre_bwd_fn", "post_bwd_fn"):
            vars(submodule).pop(name, None)


def unwrap_compiled(engine: Any) -> None:
    """Give ``engine`` the modules inside what ``torch.compile(module)`` made of them before ``deepspeed.initialize``.

    They stay compiled, as by ``module.compile()``. The wrapper hands attributes that are set on it to the module
    inside, so DeepSpeed 0.19.8 takes the two for one: it gives the module the wrapper's own empty dictionary of
    parameters, the wrapper none, and both one set of backward hooks. Without a wrapper nothing is changed.
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
    vars(engine)["module"] = module  # where DeepSpeed puts it, too, and older releases look for it
    for param, name in engine.param_names.items():
        engine.param_names[param] = name.replace("_orig_mod.", "")
        owner, _, name = engine.param_names[param].rpartition(".")
        module.get_submodule(owner)._parameters.setdefault(name, param)
        param._z3_optimizer = optimizer  # which older releases give those alone that they find in the wrapper
    for submodule in module.modules():
        _gather_when_read(submodule)
    drop_functions(module)
    engine.module_forward_pre_hook = module.register_forward_pre_hook(begins, with_kwargs=True)
    engine.module_forward_post_hook = module.register_forward_hook(ends)
    offload.setup_zero_stage3_hooks()


def _gather_when_read(module: Any) -> None:
    """Let the parameters of ``module`` be in ZeRO-3's dictionary."""
    from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict

    if not isinstance(module._parameters, ZeROOrderedDict):
        found = ZeROOrderedDict(parent_module=module)
        found.update(module._parameters)
        module._parameters = found
