"""How ZeRO-3 appears to compilers, and how DeepCompile works: hooks, dictionaries of parameters, schedules."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zerosync_strategy.core.engine import contract, deepspeed_internals


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


def deepcompile_id(optimizer: Any, param: Any) -> int:
    """Return the number of a parameter in DeepCompile's graphs."""
    return int(param.ds_id if hasattr(param, "ds_id") else optimizer.get_param_id(param))
