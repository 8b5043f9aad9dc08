"""Training without the arithmetic: large tensors are allocated, in the shapes that torch infers, and not computed.

Tensors and storages are real, so that DeepSpeed and ZeroSync run unchanged. But large tensors are never written to, and
Linux allocates no pages for memory without writes. So a model of any size is replayed in little memory and time.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

LARGE_BYTES = 1 << 16
"""Tensors with fewer bytes are computed."""
_MAP_NORESERVE = 0x4000  # disables the system's check that the memory exists

# These change the metadata of a tensor but no values, or share a storage without an annotation in their schema.
_METADATA = {
    "resize_", "resize_as_", "set_", "as_strided_", "transpose_", "t_", "squeeze_", "unsqueeze_", "detach_",
    "swapaxes_", "swapdims_", "_unsafe_view", "lift_fresh", "_resize_output_", "record_stream", "is_pinned",
}  # fmt: skip

_UNINITIALISED = {
    f"aten::{name}" for name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
}
# Operators whose result may be large although their arguments are small.
_MAY_GROW = {
    "aten::repeat", "aten::embedding", "aten::new_zeros", "aten::new_empty", "aten::new_ones", "aten::new_full",
    "aten::zeros_like", "aten::mm", "aten::bmm", "aten::addmm", "aten::add", "aten::mul", "aten::where",
    "aten::embedding_dense_backward", "aten::convolution", "aten::constant_pad_nd", "aten::index",
    "aten::slice_backward", "aten::select_backward", "aten::new_empty_strided", "aten::le", "aten::bitwise_and",
}  # fmt: skip


def empty(like: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the shape, strides and dtype of ``like``, uninitialised if small.

    A large one has zeros that take no memory until written to. It is not from the C library, which may reuse freed
    memory with values that are not finite.
    """
    needed = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True)) + 1
    nbytes = needed * like.element_size() if like.numel() else 0
    if nbytes < LARGE_BYTES:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


class SkippedCompute(TorchDispatchMode):
    """While active, operators on large tensors allocate their results and change no values.

    ``on_result`` is called with each tensor that an operator returns.
    """

    sees_zerosync = True

    def __init__(self, on_result: Callable[[torch.Tensor], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_result = on_result
        self._shapes: dict[Any, Any] = {}  # cached by operator and arguments, since layers and steps repeat

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if _keeps_values(func):
            return func(*args, **(kwargs or {}))  # no new storage
        result = self._run(func, args, kwargs or {})
        if func._schema.name in _UNINITIALISED and not _is_large(result):
            result.zero_()  # the operator that would fill it may be skipped
        for tensor in _tensors(result):
            self._on_result(tensor)
        return result

    def _run(self, func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        if func is torch.ops.aten.equal.default:
            return True  # so that a search for changed values finds none
        given = _tensors((args, kwargs))
        is_small = not any(map(_is_large, given))
        if is_small and given and func._schema.name not in _MAY_GROW:
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            from torch._C._distributed_c10d import FakeWork

            work, count = FakeWork().boxed(), len(func._schema.returns)  # complete immediately
            return None if not count else work if count == 1 else (args[0], work)
        if func.namespace != "aten" or str(kwargs.get("device")) == "meta":
            return func(*args, **kwargs)
        key = func, _described(args), _described(kwargs)
        if key not in self._shapes:
            try:
                self._shapes[key] = _shapes_of(func, args, kwargs)
            except (NotImplementedError, RuntimeError):  # shapes depend on values, or the operator has no meta kernel
                self._shapes[key] = NotImplemented
        shapes, returns = self._shapes[key], func._schema.returns
        if shapes is NotImplemented or (is_small and not any(map(_is_large, _tensors(shapes)))):
            return func(*args, **kwargs)
        results = [
            value if (written := _written(func, returned, args, kwargs)) is None else written
            for returned, value in zip(returns, shapes if len(returns) > 1 else (shapes,), strict=False)
        ]
        results = [tree_map_only(torch.Tensor, _real, value) for value in results]
        return tuple(results) if len(results) > 1 else results[0] if results else None


def _real(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_meta:
        return tensor
    return empty(tensor) if _is_large(tensor) else torch.zeros_like(tensor, device="cpu")


def _tensors(values: object) -> list[torch.Tensor]:
    """Return the tensors in nested lists and dicts. torch's pytree would take half of a replay's time for it."""
    if isinstance(values, (list, tuple, dict)):
        each = values.values() if isinstance(values, dict) else values
        return [tensor for value in each for tensor in _tensors(value)]
    return [values] if isinstance(values, torch.Tensor) else []


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= LARGE_BYTES


@functools.cache
def _keeps_values(func: Any) -> bool:
    """Return whether the result shares the storage of an argument and no values are written."""
    returns = func._schema.returns
    is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return is_view or func._schema.name.split("::")[-1] in _METADATA


def _described(value: object) -> Hashable:
    """Return a hashable description of arguments that determines the shapes of an operator's results."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    if isinstance(value, dict):
        return tuple((name, _described(each)) for name, each in value.items() if name != "generator")
    return type(value), value


def _shapes_of(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    metas: dict[int, torch.Tensor] = {}

    def meta(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in metas:
            metas[id(tensor)] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return metas[id(tensor)]

    args, kwargs = tree_map_only(torch.Tensor, meta, (args, kwargs))
    names = {argument.name for argument in func._schema.arguments}
    if "device" in names and (kwargs.get("device") is not None or not metas):
        kwargs = {**kwargs, "device": torch.device("meta")}
    kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
    return func(*args, **kwargs)


def _written(func: Any, returned: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Return the written argument of which ``returned`` is an alias; ``None`` for a new tensor."""
    if returned.alias_info is None:
        return None
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set & returned.alias_info.before_set:
            return args[position] if position < len(args) else kwargs[argument.name]
    return None
