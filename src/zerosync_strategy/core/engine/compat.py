"""Support for CPUs without a compiler, and for models that torch accepts and DeepSpeed 0.19.8 does not.

- Parameters without dimensions, such as CLIP's ``logit_scale``. DeepSpeed broadcasts each as bytes, and torch
  cannot view a scalar as bytes. It fails when it starts, and when a context ends that has gathered one to change it, as
  to save the model.
- Parameters in any memory layout. torch cannot view a tensor as bytes if its last dimension is strided, as in
  ``channels_last``, and flat buffers or shards lose the layout anyway. So they are made contiguous first.
- Modules that return an object without attributes, such as a number. Under ZeRO-3, DeepSpeed looks for tensors in its
  ``vars()``.

Parameters that share memory (``b.weight.data = a.weight.data``) would silently be separated, because DeepSpeed gives
each one memory of its own, without a trace. So sharing is recorded here, for ``attach()``.
"""

from __future__ import annotations

import atexit
import functools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zerosync_strategy.core.engine import contract, deepspeed_internals, param_functions, patches
from zerosync_strategy.core.engine.types import DeepSpeedEngine
from zerosync_strategy.core.engine.zero import is_building_engine, require_supported_optimizer

# In a tensor's __dict__:
_SHARES = "_zerosync_shares_memory_with"  # a reference to a tensor with the same memory
_TOO_LATE = "_zerosync_shared_too_late"  # it was given the empty memory of a sharded tensor


def allow_any_model() -> None:
    """Make engines that are built in this process accept these models."""
    contract.require(deepspeed_internals.ANY_MODEL)
    patches.wrap(patches.CONFIGURE_MODEL, _configure_model)
    patches.wrap(patches.BROADCAST_MODEL, _broadcast_model)
    patches.wrap(patches.SHARD, _shard)
    # Shadows the builtin in that file alone.
    patches.replace(patches.OUTPUTS, lambda _: lambda output: getattr(output, "__dict__", {}))
    param_functions.intercept_contexts()


def _configure_model(stock: Callable[..., None], engine: DeepSpeedEngine, model: nn.Module) -> None:
    if is_building_engine():
        require_supported_optimizer(engine)  # before DeepSpeed compiles one
    prepare_to_broadcast(model)  # before it is converted to another dtype
    stock(engine, model)


def _broadcast_model(stock: Callable[[DeepSpeedEngine], None], engine: DeepSpeedEngine) -> None:
    scalars = [param for param in engine.module.parameters() if param.dim() == 0]
    for param in scalars:
        param.data = param.data.view(1)
    try:
        stock(engine)
    finally:
        for param in scalars:
            param.data = param.data.view(())


def _shard(stock: Callable[[object, nn.Parameter], None], init: object, param: Any) -> None:
    prepare_to_shard(param)
    if param.dim():
        return stock(init, param)
    param.data = param.data.view(1)
    stock(init, param)
    param.ds_shape = torch.Size(())  # the shape after every gather from now on


# ---- memory ------------------------------------------------------------------------------------------------------


class _StorageView(NamedTuple):
    """The elements of its storage that a tensor has, in units of its own elements."""

    tensor: weakref.ref[torch.Tensor]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    itemsize: int

    @property
    def last(self) -> int:
        steps = zip(self.shape, self.stride, strict=True)
        return self.first + sum((size - 1) * stride for size, stride in steps)

    @property
    def repeats(self) -> bool:
        return any(size > 1 and stride == 0 for size, stride in zip(self.shape, self.stride, strict=True))

    def mark(self, elements: torch.Tensor, first: int) -> torch.Tensor:
        return elements.as_strided(self.shape, self.stride, self.first - first)

    def meets(self, other: _StorageView) -> bool:
        """Return whether the two have an element in common."""
        if self.itemsize != other.itemsize:
            return True  # parameters of several dtypes in one buffer are not expected
        first, last = min(self.first, other.first), max(self.last, other.last)
        if self.last < other.first or other.last < self.first:
            return False
        elements = torch.zeros(last - first + 1, dtype=torch.bool)
        self.mark(elements, first).fill_(True)
        return bool(other.mark(elements, first).any())


_sharded: dict[int, tuple[StorageWeakRef, list[_StorageView]]] = {}  # storages that outlive the sharding by zero.Init


def prepare_to_broadcast(module: torch.nn.Module) -> None:
    """Before DeepSpeed broadcasts the parameters of ``module``, record which share memory, and make them contiguous."""
    by_memory: dict[int, list[_StorageView]] = {}
    with torch._C.DisableTorchFunctionSubclass():  # parameters of another engine may be at rest
        for tensor in (*module.parameters(), *module.buffers()):
            if not hasattr(tensor, "ds_id"):  # else zero.Init has recorded it
                tensor.__dict__.pop(_SHARES, None)
            if _has_memory(tensor):
                _compare(tensor, by_memory.setdefault(tensor.untyped_storage()._cdata, []))
        for param in module.parameters():
            _straighten(param)


def prepare_to_shard(param: nn.Parameter) -> None:
    """Do the same before ``zero.Init`` shards ``param``."""
    if _has_memory(param):
        storage = param.untyped_storage()
        for key in [key for key, (memory, _) in _sharded.items() if memory.expired()]:
            del _sharded[key]
        _compare(param, _sharded.setdefault(storage._cdata, (StorageWeakRef(storage), []))[1])
        _straighten(param)


def sharing(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of two tensors of ``module`` that shared memory, if one is trained; they may be equal."""
    tensors: Iterable[tuple[str, torch.Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    names = {id(tensor): name for name, tensor in tensors}
    for name, tensor in tensors:
        other = tensor.__dict__.get(_SHARES, lambda: None)()
        if other is None or id(other) not in names:
            continue
        if tensor.requires_grad or other.requires_grad or _TOO_LATE in tensor.__dict__:
            yield names[id(other)], name


def _has_memory(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_meta and not is_traceable_wrapper_subclass(tensor)
    return is_plain and (tensor.numel() > 0 or hasattr(tensor, "ds_id"))  # a released one is empty, in its own storage


def _compare(tensor: Any, others: list[_StorageView]) -> None:
    """Record whether ``tensor`` shares elements with one of ``others``, in the same storage, and add it to them."""
    view = _StorageView(
        weakref.ref(tensor), tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.element_size()
    )
    if view.repeats:
        tensor.__dict__[_SHARES] = view.tensor
        return
    for other in others:
        if tensor.numel() == 0:
            tensor.__dict__[_TOO_LATE] = True
        if tensor.numel() == 0 or view.meets(other):
            tensor.__dict__[_SHARES] = other.tensor
            break
    others.append(view)


def _straighten(param: nn.Parameter) -> None:
    if param.layout is torch.strided and not param.is_contiguous():
        param.data = param.data.contiguous()


# ---- CPUs ------------------------------------------------------------------------------------------------------------


def prepare_cpu() -> None:
    """Make DeepSpeed run on CPU in this process. Call it before ``deepspeed.init_distributed`` or ``initialize``.

    DeepSpeed 0.19.8 compiles a shared-memory collective on CPU at every start. This takes 35 to 90 s, and a killed run
    leaves a lock on which later runs hang. Plain gloo does not need it, so the operator is marked as unavailable.

    This, and the support of parameters without dimensions, is undone when the last engine is detached or destroyed.
    Call it again before the next one is made.

    Raises:
        RuntimeError: DeepSpeed's process group exists already, on another accelerator.
    """
    import deepspeed.ops
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator, set_accelerator

    _start_without_compiler(deepspeed.ops.__compatible_ops__)
    _pause_at_exit()
    allow_any_model()
    if get_accelerator().device_name() != "cpu":
        if comm.is_initialized():
            raise RuntimeError(
                f"DeepSpeed already runs on {get_accelerator().device_name()!r} in this process and cannot move to the"
                " CPU. Call prepare_cpu() before the process group is made, or set DS_ACCELERATOR=cpu."
            )
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        set_accelerator(CPU_Accelerator())
        patches.install(patches.ACCELERATOR)


def take_process_group() -> None:
    """Make DeepSpeed use a process group that torch has made, before it builds an engine.

    ``zero.Init`` reads the configuration first, and would assume a world of one process.
    """
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator

    if dist.is_initialized() and not comm.is_initialized():
        if dist.get_backend() == "gloo" or get_accelerator().device_name() == "cpu":
            prepare_cpu()
        comm.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)


def leave_out_ranges() -> None:
    """Disable DeepSpeed's ranges for profilers, which do not exist on CPUs.

    They have no effect, but make one in six of the Python calls of a ZeRO-3 step.
    """
    patches.replace(patches.RANGES, lambda _: False)


def _start_without_compiler(operators: dict[str, object]) -> None:
    if patches.is_installed(patches.SHARED_MEMORY):
        return
    name = "deepspeed_shm_comm"
    before = operators.get(name)
    operators[name] = False

    def undo() -> None:
        if before is None:
            operators.pop(name, None)
        else:
            operators[name] = before

    patches.install(patches.SHARED_MEMORY, undo)


@functools.cache
def _pause_at_exit() -> None:
    # A thread of gloo still drops the tensors of the last collectives, which takes Python's lock; if Python ends
    # meanwhile, torch 2.13 aborts the process: 13 of 25 runs of 50 all-gathers, and none of 20 after this pause.
    atexit.register(time.sleep, 0.1)
    patches.install(patches.EXIT)
