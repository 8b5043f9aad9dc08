"""What compilers see of ZeRO-3, and what DeepCompile does: hooks, dictionaries of parameters, schedules."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zerosync_strategy.core.engine import contract, deepspeed_internals


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


@contextmanager
def deepcompile_last_pass(last: Callable[..., None]) -> Iterator[None]:
    """Around DeepCompile's preparation of an engine: ``last`` runs after its own passes, whenever they run.

    What it lets its own reductions find at the beginning of a backward is left out.
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


def deepcompile_id(optimizer: Any, param: Any) -> int:
    """Return the number by which DeepCompile's graphs name a parameter."""
    return int(param.ds_id if hasattr(param, "ds_id") else optimizer.get_param_id(param))
