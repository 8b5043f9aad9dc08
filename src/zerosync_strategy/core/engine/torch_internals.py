"""The internals of torch that ZeroSync uses (rule C1): those of every training, and those of single features."""

from __future__ import annotations

from zerosync_strategy.core.engine.internals import Internal

_C10D = "torch.distributed.distributed_c10d"
_BINDINGS = "torch._C._distributed_c10d"
_MODULE = "torch.nn.modules.module"
_DYNAMO = "torch._dynamo.eval_frame"

TRAINING = (
    Internal("window", "torch._C", "_current_graph_task_id"),
    Internal("window", "torch._C", "_will_engine_execute_node"),
    Internal("window", "torch.autograd.Variable", "_execution_engine"),
    Internal("window", "torch.Tensor", "_version"),
    Internal("window", "torch.Tensor", "_is_view"),
    Internal("values of sharded parameters", "torch._C", "DisableTorchFunctionSubclass", public=True),
    Internal("values of sharded parameters", "torch.UntypedStorage", "_cdata"),
    Internal("values of sharded parameters", "torch.utils._pytree", "tree_map", public=True),
    Internal("memory layouts", "torch.utils._python_dispatch", "is_traceable_wrapper_subclass", public=True),
    Internal("overlapped gathers", "torch.Tensor", "_backward_hooks"),
    Internal("overlapped gathers", "torch.Tensor", "_post_accumulate_grad_hooks"),
    Internal("memory of the host", "torch._C", "_storage_Use_Count"),
    Internal("memory of the host", "torch._C", "_host_emptyCache", optional=True),  # of builds for a GPU
    Internal("reduction", "torch", "_chunk_cat"),
    Internal("edited parameters", "torch", "_foreach_copy_"),
    Internal("linear layers", "torch._C", "_are_functorch_transforms_active"),
    Internal("linear layers", "torch._C._nn", "linear", public=True),
    Internal("unsharding on read", "torch._C._FunctionBase", "_set_sequence_nr"),
    Internal("unsharding on read", "torch.nn.Module", "_call_impl"),
    Internal("unsharding on read", "torch.nn.Module", "_compiled_call_impl"),
    Internal("unsharding on read", "torch.nn.Module", "_parameters", named_in=_MODULE),
    Internal("unsharding on read", "torch.nn.Module", "_modules", named_in=_MODULE),
    Internal("unsharding on read", "torch.nn.Module", "_forward_pre_hooks", named_in=_MODULE),
    Internal("steps by part", "torch.optim.Optimizer", "_optimizer_step_pre_hooks", named_in="torch.optim.optimizer"),
    Internal("steps by part", "torch.optim.Optimizer", "_optimizer_step_post_hooks", named_in="torch.optim.optimizer"),
    Internal("steps by part", "torch.optim.optimizer", "_global_optimizer_pre_hooks"),
    Internal("steps by part", "torch.optim.optimizer", "_global_optimizer_post_hooks"),
    Internal("steps by part", "torch.optim.Optimizer", "_wrapped_by_lr_sched", named_in="torch.optim.lr_scheduler"),
    Internal("trial of an optimizer", "torch.utils._python_dispatch", "_disable_current_modes", ()),
    Internal("traces", "torch.autograd", "_profiler_enabled"),
    Internal("communication", "torch.distributed.ProcessGroup", "_device_types"),
    Internal("communication", "torch.distributed.ProcessGroup", "_get_backend"),
    Internal("communication", f"{_BINDINGS}.Backend", "_get_sequence_number_for_group"),
    Internal("communication", f"{_BINDINGS}.Backend.Options", "_timeout"),
    Internal("communication", _C10D, "_get_default_timeout", ("backend",)),
    # Where torch has not yet made it public, as set_timeout.
    Internal("communication", _C10D, "_set_pg_timeout", ("timeout", "group"), optional=True),
    Internal("errors of every rank", _C10D, "_get_default_group", ()),
    Internal("errors of every rank", _C10D, "_get_default_store", ()),
    Internal("errors of every rank", _C10D, "_world"),
    # Each build of torch has those of its backends.
    Internal("errors of every rank", _BINDINGS, "_dump_fr_trace", optional=True),
    Internal("errors of every rank", _BINDINGS, "_dump_nccl_trace", optional=True),
)
COMPILATION = (
    Internal("compiled models", "torch._dynamo", "OptimizedModule", public=True),
    Internal("compiled models", "torch._dynamo.OptimizedModule", "_orig_mod", named_in=_DYNAMO),
    Internal("compiled models", "torch._dynamo.OptimizedModule", "dynamo_ctx", named_in=_DYNAMO, public=True),
    Internal("compiled models", _DYNAMO, "skip_code", public=True),
    Internal("compiled models", "torch._dynamo.config", "nontraceable_tensor_subclasses", public=True, optional=True),
    Internal("compiled models", _DYNAMO, "_torchdynamo_orig_callable", named_in=_DYNAMO),
)
RACE_CHECK = (
    Internal("race check", "torch.utils._python_dispatch", "TorchDispatchMode", public=True),
    Internal("race check", "torch.utils._python_dispatch", "_get_current_dispatch_mode_stack", ()),
    Internal("race check", "torch.overrides", "_get_current_function_mode_stack", ()),
    Internal("race check", "torch.utils._python_dispatch", "_push_mode"),
    Internal("race check", "torch.utils._python_dispatch", "_pop_mode"),
    Internal("race check", "torch._C", "_current_autograd_node"),
    Internal("race check", "torch._subclasses.fake_tensor", "FakeTensor", public=True),
    Internal("race check", "torch.autograd", "_engine_run_backward"),
)
RACE_CHECK_ON_CUDA = (
    Internal("race check", "torch._C", "_activate_gpu_trace"),
    Internal("race check", "torch.cuda._gpu_trace", "EventRecordCallbacks", public=True),
)
PLAN = (
    Internal("plan", "torch.testing._internal.distributed.fake_pg", "FakeStore", public=True),
    Internal("plan", _BINDINGS, "FakeWork", public=True),
    Internal("plan", "torch.utils._python_dispatch", "TorchDispatchMode", public=True),
    Internal("plan", "torch.utils._pytree", "tree_map_only", public=True),
    Internal("plan", "torch._ops.OpOverload", "_schema", named_in="torch._ops"),
)
EVERY_TABLE = (TRAINING, COMPILATION, RACE_CHECK, RACE_CHECK_ON_CUDA, PLAN)
