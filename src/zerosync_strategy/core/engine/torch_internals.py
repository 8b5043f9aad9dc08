"""The internals of torch that ZeroSync uses (rule C1): for every training, and for single features."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from zerosync_strategy.core.engine.contract import rows

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_C10D = "torch.distributed.distributed_c10d"
_BINDINGS = "torch._C._distributed_c10d"
_DISPATCH = "torch.utils._python_dispatch"
_DYNAMO = "torch._dynamo.eval_frame"

TRAINING = (
    *rows("training", "torch._C", """
        _current_graph_task_id _will_engine_execute_node +DisableTorchFunctionSubclass _storage_Use_Count
        _are_functorch_transforms_active _len_torch_dispatch_stack
    """),
    *rows("training", "torch._C", "_host_emptyCache _cuda_getCurrentRawStream", optional=True),  # in builds for a GPU
    *rows("training", "torch._C._autograd", """
        _unsafe_set_version_counter _get_sequence_nr _saved_tensors_hooks_is_enabled _top_saved_tensors_default_hooks
        _push_saved_tensors_default_hooks _pop_saved_tensors_default_hooks
    """),
    *rows("training", "torch._C._nn", "+linear"),
    *rows("training", "torch._C._FunctionBase", "_set_sequence_nr _sequence_nr"),
    *rows("training", "torch", "_chunk_cat _foreach_copy_"),
    *rows("training", "torch.autograd", "_profiler_enabled"),
    *rows("training", "torch.autograd.Variable", "_execution_engine"),
    *rows("training", "torch.Tensor", "_version _is_view _base _backward_hooks _post_accumulate_grad_hooks"),
    *rows("training", "torch.UntypedStorage", "_cdata"),
    *rows("training", "torch._C._functorch", "+is_functorch_wrapped_tensor +get_unwrapped"),
    *rows("training", "torch._functorch.pyfunctorch", "+temporarily_clear_interpreter_stack"),
    *rows("training", "torch._functorch.eager_transforms", "_wrap_for_grad"),
    *rows("training", "torch._functorch.vmap", "_add_batch_dim"),
    *rows("training", "torch.utils._pytree", "+tree_map +tree_leaves"),
    *rows("training", _DISPATCH, """
        +is_traceable_wrapper_subclass _disable_current_modes() _get_current_dispatch_mode_stack() +TorchDispatchMode
    """),
    *rows("training", "torch.nn.Module", "_call_impl _compiled_call_impl"),
    *rows("training", "torch.nn.Module", "_parameters _modules _forward_pre_hooks", named_in="torch.nn.modules.module"),
    *rows("steps by part", "torch.optim.Optimizer", "_optimizer_step_pre_hooks _optimizer_step_post_hooks",
          named_in="torch.optim.optimizer"),
    *rows("steps by part", "torch.optim.optimizer", "_global_optimizer_pre_hooks _global_optimizer_post_hooks"),
    *rows("steps by part", "torch.optim.Optimizer", "_wrapped_by_lr_sched", named_in="torch.optim.lr_scheduler"),
    *rows("compiled autograd", _DYNAMO, "_torchdynamo_disable", named_in=_DYNAMO),
    *rows("compiled autograd", "torch._C._dynamo.eval_frame", """
        _FrameAction _FrameExecStrategy +set_code_exec_strategy
    """),
    *rows("checkpoints", "torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *rows("communication", "torch.distributed.ProcessGroup", """
        _device_types _get_backend _start_coalescing _end_coalescing
    """),
    *rows("communication", f"{_BINDINGS}.Backend", "_get_sequence_number_for_group"),
    *rows("communication", f"{_BINDINGS}.Backend.Options", "_timeout"),
    *rows("communication", _C10D, """
        _get_default_timeout(backend) _get_default_group() _get_default_store() _world
        _process_group_name(ranks, use_hashed_name)
    """),
    *rows("communication", _C10D, "_set_pg_timeout(timeout, group)", optional=True),  # or the public set_timeout
    *rows("communication", _BINDINGS, "_dump_fr_trace _dump_nccl_trace", optional=True),  # depends on the build
)  # fmt: skip
COMPILATION = (
    *rows("compiled models", "torch._dynamo.OptimizedModule", "_orig_mod +dynamo_ctx", named_in=_DYNAMO),
    *rows("compiled models", _DYNAMO, "+skip_code"),
    *rows("compiled models", _DYNAMO, "_torchdynamo_orig_callable", named_in=_DYNAMO),
    *rows("compiled models", "torch._dynamo.config", "+nontraceable_tensor_subclasses", optional=True),
)
PLAN = (
    *rows("plan", "torch.testing._internal.distributed.fake_pg", "+FakeStore"),
    *rows("plan", _BINDINGS, "+FakeWork"),
    *rows("plan", _DISPATCH, "+TorchDispatchMode"),
    *rows("plan", "torch.utils._pytree", "+tree_map_only"),
    *rows("plan", f"{_BINDINGS}.ProcessGroup", "_allgather_base _reduce_scatter_base", optional=True),
    *rows("plan", "torch._ops.OpOverload", "_schema", named_in="torch._ops"),
)
EVERY_TABLE = (TRAINING, COMPILATION, PLAN)


def plain_torch() -> AbstractContextManager[object]:
    """Around operators of our own inside of a program's: hide them from dispatch modes and transforms of torch.func.

    Modes with the attribute ``sees_zerosync`` still see them.
    """
    stack = ExitStack()
    watching = [mode for mode in _get_current_dispatch_mode_stack() if getattr(mode, "sees_zerosync", False)]
    stack.enter_context(_disable_current_modes())
    for mode in watching:
        stack.enter_context(mode)
    stack.enter_context(outside_of_transforms())
    return stack


def outside_of_transforms() -> AbstractContextManager[object]:
    """Around operators and autograd functions of our own: hide them from transforms of torch.func."""
    return temporarily_clear_interpreter_stack() if torch._C._are_functorch_transforms_active() else nullcontext()


def for_training(method: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Run ``method`` outside of torch's inference mode, so that parameters get memory that can be trained."""

    @functools.wraps(method)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return call


def internal(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """As :func:`for_training`, with parameters at rest as DeepSpeed has left them, hidden from a program's modes."""
    dispatch_modes, transforms = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active
    inference = torch.is_inference_mode_enabled

    @functools.wraps(method)
    def call(*args: object) -> _Result:
        if not (dispatch_modes() or transforms() or inference()):
            with torch._C.DisableTorchFunctionSubclass():
                return method(*args)
        with plain_torch(), torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.no_grad():
            return method(*args)

    return call


def untransformed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside of what transforms of torch.func have made of it; it has the memory."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor
