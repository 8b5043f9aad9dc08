"""What compilers see of ZeRO-3, and what DeepCompile does: hooks, dictionaries of parameters, schedules."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from zerosync_strategy.core.engine import contract, patches, torch_internals
from zerosync_strategy.core.engine.autograd_functions import drop_functions


@functools.cache
def allow_linear_in_graphs() -> None:
    """Let Dynamo take ZeRO-3's ``F.linear``, an autograd function, into its graphs as it is.

    What Dynamo makes of an autograd function instead, a class anew at each call, is in a cycle of references with what
    it saves when a graph runs eagerly: weights and inputs stay until Python collects garbage, one layer at a time.
    """
    from deepspeed.runtime.zero import linear

    contract.require(torch_internals.COMPILATION)
    from torch._dynamo.eval_frame import skip_code

    function = linear.LinearFunctionForZeroStage3
    torch.compiler.allow_in_graph(linear.zero3_linear_wrap)
    for called in (linear.zero3_linear_wrap, function.forward, function.setup_context, function.backward):
        skip_code(called.__code__)  # nor is it compiled by itself, called from a frame that is not
    patches.install(patches.COMPILERS)


def leave_to_eager_code(tensors: Any) -> None:
    """Let Dynamo run, as it is, whatever computes with tensors of the class ``tensors``, and how they do."""
    from torch._dynamo import config
    from torch._dynamo.eval_frame import skip_code

    classes: set[Any] = getattr(config, "nontraceable_tensor_subclasses", set())
    classes.add(tensors)
    skip_code(tensors.__torch_function__.__code__)


def keep_out_of_graphs(method: Any) -> None:
    """Let compiled autograd, which traces hooks on gradients, call ``method`` as it is, with all that it calls.

    A wrapper, as ``torch.compiler.disable`` makes one, would cost each gradient a call.
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    method.__func__._torchdynamo_disable = True
    set_code_exec_strategy(method.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


@functools.cache
def passive_parameters() -> type:
    """Return ZeRO-3's class of a module's dictionary of parameters, but one that gathers nothing when it is read."""
    from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict

    attributes = {"__getitem__": OrderedDict.__getitem__, "__module__": ZeROOrderedDict.__module__}
    return type("ZeROOrderedDict", (ZeROOrderedDict,), attributes)


def make_passive(module: torch.nn.Module) -> None:
    """Let reading the parameters of ``module`` gather nothing."""
    module._parameters.__class__ = passive_parameters()


def undo_passive(module: torch.nn.Module) -> None:
    """Undo :func:`make_passive`; nothing where a later engine has given the module a dictionary of its own."""
    if type(module._parameters) is passive_parameters():
        module._parameters.__class__ = passive_parameters().__bases__[0]


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether ``torch.compile`` or ``Module.compile`` has been asked for ``module`` or one in it."""
    from torch._dynamo import OptimizedModule

    return any(isinstance(of, OptimizedModule) or of._compiled_call_impl is not None for of in module.modules())


def is_in_forward(module: Any) -> bool:
    """Return whether DeepSpeed takes the forward of the model that ``module`` is in to be running."""
    return bool(module._parameters._in_forward)


def modules_running() -> list[Any]:
    """Return DeepSpeed's own stack of the modules whose forward runs, below them those of the engines."""
    from deepspeed.runtime.zero import parameter_offload

    return parameter_offload.FWD_MODULE_STACK


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
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    remove_module_hooks(offload)
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
    engine.module_forward_pre_hook = engine._create_module_forward_pre_hook()
    engine.module_forward_post_hook = engine._create_module_forward_post_hook()
    offload.setup_zero_stage3_hooks()


def remove_module_hooks(offload: Any) -> None:
    """Take away DeepSpeed's hooks around modules, so that they can be made anew."""
    offload._remove_module_hooks()
    offload.forward_hooks.clear()
    offload.backward_hooks.clear()


def _gather_when_read(module: Any) -> None:
    """Let the parameters of ``module`` be in ZeRO-3's dictionary."""
    from deepspeed.runtime.zero import parameter_offload

    if contract.has(contract.ORDERED_DICT):
        parameter_offload.ensure_zero_ordered_dict(module)
    elif not isinstance(module._parameters, parameter_offload.ZeROOrderedDict):
        found = parameter_offload.ZeROOrderedDict(parent_module=module)
        found.update(module._parameters)
        module._parameters = found


@dataclass(frozen=True)
class ModuleHook:
    """One of DeepSpeed's hooks around a module's forward.

    Attributes:
        when: ``before`` and ``after`` for those that gather and release, ``backward`` for those that prepare the
            backward, ``model`` for what begins a forward of the whole model, and empty for the engine's own around it.
        replace: puts another one in its place.
    """

    when: str
    stock: Callable[..., Any]
    replace: Callable[[Callable[..., Any]], None]


def module_hooks(engine: Any) -> list[ModuleHook]:
    """Return the hooks that DeepSpeed has on the modules of a ZeRO-3 engine."""
    offload = engine.optimizer.parameter_offload
    before = {id(module._forward_pre_hooks) for module in engine.module.modules()}
    kinds = [(handle, "") for handle in (engine.module_forward_pre_hook, engine.module_forward_post_hook)]
    kinds.append((offload.fwd_pre_hook, "model"))
    kinds += [(handle, "backward") for handle in offload.backward_hooks]
    for handle in offload.forward_hooks:
        kinds.append((handle, "before" if id(handle.hooks_dict_ref()) in before else "after"))
    return [
        ModuleHook(when, (hooks := handle.hooks_dict_ref())[handle.id], functools.partial(hooks.__setitem__, handle.id))
        for handle, when in kinds
    ]


def registered_hooks(engine: Any) -> Any:
    """Return DeepSpeed's own list of its hooks around forwards; it is another one when they were registered anew."""
    return engine.optimizer.parameter_offload.forward_hooks


def without_disable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what ``torch.compiler.disable`` has made ``function`` of, for one who is disabled: once is enough."""
    return getattr(function, "_torchdynamo_orig_callable", function)


@contextmanager
def deepcompile_last_pass(last: Callable[..., None]) -> Iterator[None]:
    """Around DeepCompile's preparation of an engine: ``last`` runs after its own passes, whenever they run.

    What it lets its own reductions find at the beginning of a backward is left out.
    """
    from deepspeed.compile import backend, util

    contract.require(contract.DEEPCOMPILE)
    before = len(util.pre_backward_hooks)
    yield
    schedule = backend.remaining_schedule
    if schedule is None:
        raise contract.changed("DeepCompile", "compile.backend.remaining_schedule is not set")
    del util.pre_backward_hooks[before:]
    backend.remaining_schedule = type(schedule)((step, [*passes, last]) for step, passes in schedule)


def deepcompile_id(optimizer: Any, param: Any) -> int:
    """Return the number by which DeepCompile's graphs name a parameter."""
    return int(param.ds_id if hasattr(param, "ds_id") else optimizer.get_param_id(param))
