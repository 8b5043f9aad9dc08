"""How ZeRO-3 appears to compilers, and how DeepCompile works: hooks, dictionaries of parameters, schedules."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zerosync_strategy.core.engine import contract, deepspeed_internals, hooks
from zerosync_strategy.core.engine.types import DeepSpeedEngine, ZeroOptimizer


def leave_to_eager_code(tensors: Any) -> None:
    """Make Dynamo run code that computes with tensors of the class ``tensors`` eagerly, and their own methods, too."""
    from torch._dynamo import config
    from torch._dynamo.eval_frame import skip_code

    classes: set[Any] = getattr(config, "nontraceable_tensor_subclasses", set())
    classes.add(tensors)
    skip_code(tensors.__torch_function__.__code__)


def keep_out_of_graphs(method: Any) -> None:
    """Make compiled autograd, which traces hooks on gradients, call ``method`` and all that it calls without tracing.

    A wrapper, such as that of ``torch.compiler.disable``, would cost one more call per gradient.
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    method.__func__._torchdynamo_disable = True
    set_code_exec_strategy(method.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


@functools.cache
def passive_parameters() -> type:
    """Return a subclass of ZeRO-3's dictionary of parameters that gathers nothing when it is read."""
    from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict

    attributes = {"__getitem__": OrderedDict.__getitem__, "__module__": ZeROOrderedDict.__module__}
    return type("ZeROOrderedDict", (ZeROOrderedDict,), attributes)


def make_passive(module: torch.nn.Module) -> None:
    """Make reads of the parameters of ``module`` gather nothing."""
    module._parameters.__class__ = passive_parameters()


def undo_passive(module: torch.nn.Module) -> None:
    """Undo :func:`make_passive`, unless a later engine has given the module its own dictionary."""
    if type(module._parameters) is passive_parameters():
        module._parameters.__class__ = passive_parameters().__bases__[0]


def unwrap_compiled(engine: DeepSpeedEngine) -> None:
    """Replace the wrappers that ``torch.compile(module)`` made before ``deepspeed.initialize`` by the modules inside.

    They stay compiled, as by ``module.compile()``. A wrapper forwards attributes that are set on it to the module
    inside, so DeepSpeed 0.19.8 confuses the two: it gives the module the wrapper's own empty dictionary of parameters,
    the wrapper none, and both one set of backward hooks. Without wrappers, nothing changes.
    """

    def unwrap(module: Any) -> torch.nn.Module:
        while (inside := vars(module)["_modules"].get("_orig_mod")) is not None:
            inside._compiled_call_impl = module.dynamo_ctx(inside._call_impl)
            module = inside
        return module

    if all(unwrap(module) is module for module in engine.module.modules()):
        return
    optimizer, offload = engine.optimizer, engine.optimizer.parameter_offload
    begins, ends = (of_model[key] for of_model, key in hooks.forward_hooks_of(engine))
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    hooks.remove_module_hooks(offload)
    for parent in list(engine.module.modules()):
        for name, child in vars(parent)["_modules"].items():
            if child is not None:
                vars(parent)["_modules"][name] = unwrap(child)
    module = engine.module = optimizer.module = offload.module = unwrap(engine.module)
    vars(engine)["module"] = module  # DeepSpeed puts it here, too, and older releases read it here
    for param, name in engine.param_names.items():
        engine.param_names[param] = plain_name(name)
        owner, _, name = engine.param_names[param].rpartition(".")
        module.get_submodule(owner)._parameters.setdefault(name, param)
        param._z3_optimizer = optimizer  # older releases set it only on parameters of the wrapper
    for submodule in module.modules():
        _gather_when_read(submodule)
    hooks.drop_functions(module)
    engine.module_forward_pre_hook = module.register_forward_pre_hook(begins, with_kwargs=True)
    engine.module_forward_post_hook = module.register_forward_hook(ends)
    offload.setup_zero_stage3_hooks()


def _gather_when_read(module: nn.Module) -> None:
    """Put the parameters of ``module`` into ZeRO-3's dictionary, if they are not."""
    from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict

    if not isinstance(module._parameters, ZeROOrderedDict):
        found = ZeROOrderedDict(parent_module=module)
        found.update(module._parameters)
        module._parameters = found


@contextmanager
def deepcompile_last_pass(last: Callable[..., None]) -> Iterator[None]:
    """Around DeepCompile's preparation of an engine: ``last`` runs after its own passes, each time they run.

    The hooks that prepare its own reductions at the start of a backward are removed.
    """
    from deepspeed.compile import backend, util

    contract.require(deepspeed_internals.DEEPCOMPILE)
    before = len(util.pre_backward_hooks)
    yield
    schedule = backend.remaining_schedule
    if schedule is None:
        raise contract.changed("DeepCompile", "compile.backend.remaining_schedule is not set")
    del util.pre_backward_hooks[before:]
    backend.remaining_schedule = type(schedule)((step, [*passes, last]) for step, passes in schedule)


def deepcompile_id(optimizer: ZeroOptimizer, param: nn.Parameter) -> int:
    """Return the number of a parameter in DeepCompile's graphs."""
    return int(param.ds_id if hasattr(param, "ds_id") else optimizer.get_param_id(param))


def plain_name(name: str) -> str:
    """Return ``name`` as it is without ``torch.compile(module)``: stage 3 unwraps modules, and FSDP2's state names."""
    return name.replace("_orig_mod.", "")
