"""DeepCompile on the CPU: its native operators, which DeepSpeed has for CUDA and NCCL alone, in Python.

DeepCompile's own passes write them into the graphs that its own compiler makes of the model, so what a test sees is
DeepCompile but for the kernels: no streams, no timing, and so no passes that depend on what was timed. Signatures and
effects follow ``csrc/compile`` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import operator
import types
from typing import Any

import torch
import torch.distributed as dist

_SCHEMAS = (
    "allgather_param(Tensor a, int graph_id, int id, ScalarType? dtype=None) -> Tensor",
    "prefetch_params_fused(int graph_id, Tensor[] params, int[] ids, ScalarType[]? dtypes=None) -> ()",
    "wait_allgather(Tensor(a) a, int graph_id, int id) -> Tensor(a)",
    "release_param(Tensor(a) a, int graph_id, int id, int n_users) -> Tensor(a)",
    "reduce_grad(Tensor a, int graph_id, int id) -> Tensor",
    "free_tensors(Tensor[] a) -> ()",
    "end_backward(Any deps, int graph_id, bool release_reduce_buckets) -> ()",
    # Named by DeepCompile when it registers its operators with inductor; no schedule of the tests has them.
    "offload_tensor(Tensor a, int graph_id, int id) -> Tensor",
    "reload_tensor(Tensor a, int graph_id, int id) -> Tensor",
    "wait_offload(Tensor a, int graph_id, int id) -> Tensor",
    "wait_reload(Tensor a, int graph_id, int id) -> Tensor",
    "offload_parameter(Tensor a, int graph_id, int id) -> ()",
    "reload_parameter(Tensor a, int graph_id, int id) -> ()",
)


class _Param:
    def __init__(self, shape: Any, tensor: torch.Tensor, gradient: torch.Tensor) -> None:
        self.shape, self.tensor, self.gradient = torch.Size(shape), tensor, gradient
        self.full: torch.Tensor | None = None
        self.uses = 0  # of the gathered parameter, until it is released
        self.reduced = False  # in this window


class Handle:
    """What DeepSpeed takes for the native module.

    Attributes:
        gathers, reductions: collectives that graphs have issued.
    """

    def __init__(self) -> None:
        self.gathers = self.reductions = 0
        self.cleanup()

    def cleanup(self) -> None:
        self._params: dict[int, _Param] = {}

    def init(self, group: Any, config: Any, bucket_size: int) -> None:
        self._group = group

    def register_z3_param(self, key: int, shape: Any, tensor: Any, gradient: Any, persistent: bool, _: Any) -> None:
        self._params[key] = _Param(shape, tensor, gradient)

    def register_param(self, key: int, shape: Any, tensor: Any, gradient: Any, offset: int) -> None:
        self._params[key] = _Param(shape, tensor, gradient)

    def update_param_grad_buffer(self, key: int, gradient: torch.Tensor, offset: int) -> None:
        self._params[key].gradient = gradient

    def enable_profiling(self, enable: bool) -> None:
        if enable:
            raise RuntimeError("these operators are not worth timing")

    def start_backward(self, update: bool) -> None:
        self._update = update

    def _nothing(self, *_: Any) -> None: ...

    register_graph_z1 = register_graph_z2 = register_graph_z3 = reset = clear_all_gathered_params = _nothing

    # ---- operators -----------------------------------------------------------------------------------------------

    def allgather_param(self, a: Any, graph: int, key: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        param = self._params[key]
        if param.full is None:
            self.gathers += 1
            part = param.tensor.detach().to(dtype or param.tensor.dtype).contiguous()
            param.full = part.new_empty(part.numel() * dist.get_world_size(self._group))
            dist.all_gather_into_tensor(param.full, part, group=self._group)
        return param.full[: param.shape.numel()].view(param.shape)

    def prefetch_params_fused(self, graph: int, params: Any, keys: list[int], dtypes: Any = None) -> None:
        for i, key in enumerate(keys):
            self.allgather_param(None, graph, key, dtypes[i] if dtypes else None)

    def wait_allgather(self, a: torch.Tensor, graph: int, key: int) -> torch.Tensor:
        return a

    def release_param(self, a: torch.Tensor, graph: int, key: int, users: int) -> torch.Tensor:
        param = self._params[key]
        param.uses = (param.uses or users) - 1
        if param.uses == 0 and param.full is not None:
            param.full.untyped_storage().resize_(0)
            param.full = None
        return a

    def reduce_grad(self, a: torch.Tensor, graph: int, key: int) -> torch.Tensor:
        self.reductions += 1
        param, world_size = self._params[key], dist.get_world_size(self._group)
        whole = a.new_zeros(param.gradient.numel() * world_size)
        whole[: a.numel()] = a.reshape(-1) / world_size
        part = torch.empty_like(param.gradient)
        dist.reduce_scatter_tensor(part, whole, group=self._group)
        param.gradient.copy_(part + param.gradient if param.reduced else part)
        param.reduced = True
        return a.new_empty(0)

    def end_backward(self, deps: Any, graph: int, release_reduce_buckets: bool) -> None:
        if self._update:
            for param in self._params.values():
                param.reduced = False

    def free_tensors(self, a: Any) -> None: ...


class _Event:
    def __init__(self, **_: Any) -> None: ...


def install() -> Handle:
    """Let engines of this process be compiled by DeepCompile. Call once, before the first is built."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.compile import backend, util
    from deepspeed.compile.passes import zero3_compile
    from deepspeed.runtime import engine

    handle = Handle()
    library = torch.library.Library("dc", "DEF")
    handle.library = library  # type: ignore[attr-defined]  # the operators go with it
    for schema in _SCHEMAS:
        name = library.define(schema)
        if hasattr(handle, name):
            library.impl(name, getattr(handle, name), "CompositeExplicitAutograd")
    library.impl("allgather_param", lambda a, g, key, dtype=None: _meta(handle, key, dtype), "Meta")
    library.impl("reduce_grad", lambda a, g, key: a.new_empty(0), "Meta")
    for name in ("wait_allgather", "release_param"):
        library.impl(name, lambda a, *_: a, "Meta")

    util.dc_handle = handle
    util.is_deepcompile_supported = engine.is_deepcompile_supported = lambda: True
    util.sym_size_ops = {operator.ge, operator.le, operator.eq, operator.ne, operator.gt, operator.lt, operator.getitem}
    # Of ranks that compile, DeepSpeed reduces numbers in the middle of a trace, where gloo's thread and the trace may
    # wait for each other. Without times there is nothing to agree on.
    zero3_compile._scheduler_budget_from_operator_profile = lambda *_: (None, "nothing was timed")
    backend._sync_memory_profile_complete = lambda complete, group=None: complete
    accelerator = get_accelerator()
    accelerator.current_device = lambda: "cpu"
    type(accelerator).Event = property(lambda _: _Event)
    accelerator.random = lambda: types.SimpleNamespace(fork_rng=lambda devices: torch.random.fork_rng([]))
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[assignment, method-assign]
    return handle


def _meta(handle: Handle, key: int, dtype: torch.dtype | None) -> torch.Tensor:
    param = handle._params[key]
    return torch.empty(param.shape, dtype=dtype or param.tensor.dtype, device="meta")
