"""A parameter of ZeRO-3: its shape, values, shard, process group and state.

A parameter that ZeRO-3 does not shard has its values, its own shape and no group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from zerosync_strategy.core.engine import contract, deepspeed_internals, patches
from zerosync_strategy.core.engine.types import Zero3Parameter


class _OfParameter(Protocol):
    param: Zero3Parameter


_Record = TypeVar("_Record", bound=_OfParameter)


def is_sharded(param: object) -> TypeGuard[Zero3Parameter]:
    """Return whether ``param`` is a parameter of ZeRO-3, gathered or not."""
    return hasattr(param, "ds_id")


def param_id(param: Any) -> int:
    """Return the number of ``param`` in the order in which parameters were built; 0 without ZeRO-3."""
    try:  # here and below: called for each parameter in each step, and getattr() would be one more call
        return param.ds_id
    except AttributeError:
        return 0


def full_shape(param: torch.Tensor) -> tuple[int, ...]:
    return tuple(param.ds_shape if is_sharded(param) else param.shape)


def full_numel(param: Any) -> int:
    try:
        return param.ds_numel
    except AttributeError:
        return param.numel()


def full_bytes(param: Any) -> int:
    try:
        return int(param.ds_numel * param.ds_tensor.element_size())
    except AttributeError:
        return int(param.numel() * param.element_size())


def process_group(param: Any) -> Any:
    """Return the process group whose ranks shard ``param``; ``None`` without ZeRO-3."""
    try:
        return param.ds_process_group
    except AttributeError:
        return None


def is_persistent(param: Any) -> bool:
    """Return whether DeepSpeed keeps ``param`` gathered permanently."""
    try:
        return param.ds_persist
    except AttributeError:
        return False


def is_gathered(param: Any) -> bool:
    """Return whether ``param`` has its values: it is neither released nor in flight."""
    try:
        return bool(param.ds_status._name_ == "AVAILABLE")
    except AttributeError:
        return True


def is_left_sharded(param: nn.Parameter) -> bool:
    """Return whether ``param`` has no values and no attached engine that could gather them."""
    return is_sharded(param) and full_numel(param) > 0 and param.numel() == 0 and "_zerosync_record" not in vars(param)


def is_released(param: Zero3Parameter) -> bool:
    """Return whether ``param`` is sharded: neither gathered nor in flight."""
    return bool(param.ds_status._name_ == "NOT_AVAILABLE")


def least_status(params: Iterable[Zero3Parameter]) -> str:
    """Return DeepSpeed's status of one of ``params`` that is released, else of one in flight, else that of all."""
    least = "AVAILABLE"
    for param in params:  # no calls: this runs for every module
        if (status := param.ds_status._name_) == "NOT_AVAILABLE":
            return "NOT_AVAILABLE"
        if status == "INFLIGHT":
            least = status
    return least


def released(params: Iterable[Zero3Parameter]) -> list[Zero3Parameter]:
    found: list[Zero3Parameter] = []
    for param in params:  # no calls
        if param.ds_status._name_ == "NOT_AVAILABLE":
            found += (param,)
    return found


def gathered(records: Iterable[_Record]) -> list[_Record]:
    found: list[_Record] = []
    for record in records:  # no calls
        if record.param.ds_status._name_ == "AVAILABLE":
            found += (record,)
    return found


def by_values(
    params: Iterable[Any],
) -> tuple[list[Zero3Parameter], list[Zero3Parameter], list[Zero3Parameter]]:
    """Return the gathered ``params``, those of them in another shape than their own, and the params not gathered.

    Those for whose values no stream has waited are left out: nothing can have changed them, and they may still come.
    """
    found: list[Zero3Parameter] = []
    reshaped: list[Zero3Parameter] = []
    others: list[Zero3Parameter] = []
    for param in params:  # few calls
        if param.ds_status._name_ != "AVAILABLE":
            others += (param,)
            continue
        gather = param._zerosync_record.gather
        if gather is not None and gather.event is not None and not gather.users and not gather.is_complete:
            continue
        found += (param,)
        if param.shape != param.ds_shape:
            reshaped += (param,)
    return found, reshaped, others


def param_ids(params: Iterable[Zero3Parameter]) -> tuple[int, ...]:
    ids: list[int] = []
    for param in params:  # no calls
        ids += (param.ds_id,)
    return tuple(ids)


@contextmanager
def in_full_shapes(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """While active, the released ``params`` have their full shapes, and read as NaN.

    A program may choose optimizer options by shape, and set and change gradients, which autograd requires to have the
    shape of the parameter.
    """
    placeholders = []
    with as_it_is():
        for param in params:
            if param.numel() == 0 and is_sharded(param):
                data = param.data
                param.data = data.new_full((), torch.nan).expand(full_shape(param))  # torch refuses to add to it
                placeholders.append((param, data, param.data.data_ptr()))
    try:
        yield
    finally:
        with as_it_is():
            for param, data, placeholder in placeholders:
                if param.data.data_ptr() == placeholder:  # not gathered meanwhile
                    param.data = data


def gather(param: Zero3Parameter) -> torch.Tensor:
    """Return the values of a released parameter, which stays released, in memory of their own. Collective."""
    with as_it_is():
        data = param.data
        param.all_gather_coalesced([param]).wait()
        full: torch.Tensor = param.data
        if full.data_ptr() == param.ds_tensor.data_ptr():  # a group of one rank gathers nothing
            full = full.clone()
        param.partition()
        param.data = data
    return full


as_it_is = torch._C.DisableTorchFunctionSubclass
"""A context in which a parameter at rest is the empty tensor that DeepSpeed has left: nothing is intercepted."""


def answer_of_gathered(name: str, param: Zero3Parameter) -> object:
    """Return what the attribute ``name`` of ``param`` would be if it were gathered; or raise ``AttributeError``."""
    if name == "ds_status":
        return type(param.ds_status).AVAILABLE
    if name in ("ds_shape", "ds_numel"):
        return getattr(param, name)
    raise AttributeError(f"{type(param).__name__!r} object has no attribute {name!r}")


def shard_numel(param: Any) -> int:
    """Return the size of one rank's shard of ``param`` or of its gradient, padding included."""
    return int(param.ds_tensor.ds_numel)


def own_range(param: Any) -> tuple[int, int]:
    """Return where this rank's shard of ``param`` begins in the flat parameter, and its elements without padding."""
    size = shard_numel(param)
    start = min(param.ds_process_group.rank() * size, full_numel(param))
    return start, min(size, full_numel(param) - start)


def shard_pair(param: Zero3Parameter, full: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return this rank's shard of ``param``, flat and without padding, and the same slice of ``full``.

    ``full`` is by default the gathered values. Return ``None`` if the shard is all padding or not in memory.
    """
    return next(iter(shard_pairs((param,), full)), None)


def shard_pairs(
    params: Iterable[Zero3Parameter], full: torch.Tensor | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return :func:`shard_pair` of each of ``params`` that has one."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    ranks: dict[dist.ProcessGroup, int] = {}
    for param in params:  # few calls
        group, size, shard = param.ds_process_group, param.ds_tensor.ds_numel, param.ds_tensor.data
        if group not in ranks:
            ranks[group] = group.rank()
        start = ranks[group] * size
        end = start + size
        if end > param.ds_numel:
            end = max(start, param.ds_numel)
            shard = shard[: end - start]
        if shard.shape[0]:
            values = param.data if full is None else full
            found += ((shard, values.reshape(-1)[start:end]),)
    return found


def shard_of(param: Zero3Parameter, full: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of ``full``, flat and zero-padded. ``ValueError``: the size differs."""
    require_numel(full, full_shape(param))
    size = shard_numel(param)
    start = min(dist.get_rank(param.ds_process_group) * size, full.numel())
    shard = full.reshape(-1)[start : start + size]
    return torch.nn.functional.pad(shard, (0, size - shard.numel()))


def require_numel(value: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ``ValueError`` unless ``value`` has as many elements as a parameter of this ``shape``."""
    if value.numel() != math.prod(shape):
        raise ValueError(
            f"One of DeepSpeed's safe_set_full_...() got a value of shape {tuple(value.shape)} for a parameter of shape"
            f" {tuple(shape)}. Give one of that shape."
        )


def without_values(param: Zero3Parameter, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of the full shape of ``param``, of ``dtype``, without memory."""
    return torch.empty(full_shape(param), dtype=dtype, device="meta")


def own_shard(param: Zero3Parameter) -> torch.Tensor:
    """Return this rank's shard of ``param``, flat and padded."""
    return param.ds_tensor.data


def has_plain_shard(param: Zero3Parameter) -> bool:
    """Return whether the shard of ``param`` has plain values, in memory and once: not quantized, on NVMe, or of hpZ."""
    shard = param.ds_tensor
    return not (shard.final_location == "nvme" or has_secondary_shard(param) or is_quantized(param))


def has_secondary_shard(param: nn.Parameter) -> bool:
    """Return whether ZeRO-3 has a second copy of ``param``, sharded over the ranks of a node (hpZ)."""
    return getattr(param, "ds_zero_param_process_group", None) is not None


def is_quantized(param: Zero3Parameter) -> bool:
    return hasattr(param.ds_tensor, "ds_quant_scale")


def gather_dtype(param: Zero3Parameter) -> torch.dtype:
    """Return the dtype in which ``param`` is gathered; with DeepSpeed's ``torch_autocast``, it may not be its own."""
    from deepspeed.runtime.zero.partition_parameters import get_allgather_dtype

    return get_allgather_dtype(param, param.ds_tensor)


def shard_dtype(param: Zero3Parameter) -> torch.dtype:
    return param.ds_tensor.dtype


def has_own_group(param: nn.Parameter) -> bool:
    """Return whether :func:`shard_over` or DeepSpeed has chosen a process group for this parameter alone."""
    return hasattr(param, "ds_zero_partition_process_group")


def shard_over(param: Any, group: dist.ProcessGroup) -> None:
    """Make ZeRO-3 shard ``param``, still full, over ``group``, with the values of the group's first rank."""
    contract.need(deepspeed_internals.PARAM_GROUP, "leave shard_over() out")
    param.ds_zero_partition_process_group = group
    # DeepSpeed's mark of weights that differ by rank; else the engine would first broadcast the values of rank 0.
    param.ds_optim_param = True


def wrap_zero_init(check: Callable[[dist.ProcessGroup, dist.ProcessGroup], None]) -> None:
    """Call ``check(inner group, outer group)`` when a ``zero.Init`` of this process is entered inside another.

    Only if the inner one is enabled and has a process group of fewer than all ranks.
    """
    from deepspeed.runtime.zero import partition_parameters

    contract.require(deepspeed_internals.NESTED_ZERO_INIT)

    def enter(stock: Callable[[Any], object], init: Any) -> object:
        outer = partition_parameters.top_level_context
        if init.enabled and outer is not None and dist.get_world_size(init.ds_process_group) < dist.get_world_size():
            check(init.ds_process_group, outer.ds_process_group)
        return stock(init)

    patches.wrap(patches.ENTER_INIT, enter)
