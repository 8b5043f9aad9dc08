"""What gathers and releases the parameters of ZeRO-3: DeepSpeed's coordinator, and gathers of our own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.engine import contract, zero3
from zerosync_strategy.core.engine.interpose import interpose, replaced, restore
from zerosync_strategy.core.engine.overrides import InferenceOverrides
from zerosync_strategy.core.engine.param_functions import for_training
from zerosync_strategy.core.engine.parameter import Claim, record_of


def coordinator(optimizer: Any) -> Any:
    """Return what gathers and releases the parameters of a ZeRO-3 optimizer."""
    return optimizer.parameter_offload.get_param_coordinator()


def gather_stream(coordinator: Any) -> Any:
    """Return the stream on which DeepSpeed gathers and waits for gathers; ``None`` on a device without streams."""
    return getattr(coordinator, contract.GATHER_STREAM)


def gathering_on(coordinator: Any, stream: Any) -> AbstractContextManager[None]:
    """While active, DeepSpeed gathers and waits for gathers on ``stream``."""
    return replaced(coordinator, contract.GATHER_STREAM, stream)


Arrival = Callable[[], list[tuple[Any, torch.Tensor]]]
"""Waits for a gather, and returns each parameter with its values in its own shape and dtype, the caller's to keep."""


@for_training
def gather_shards(
    params: Sequence[Any], dtype: torch.dtype, keep: Callable[[Any, torch.Tensor], None] | None = None
) -> Arrival:
    """Gather all shards of several parameters of one process group by one message, sent in ``dtype``.

    DeepSpeed's own gather puts a parameter together from each rank's part of it. This one does work that does not grow
    with the number of ranks: row r of what is received has the shards of rank r, and a parameter is a range of columns.

    Args:
        params: with shards of one dtype, for which :func:`~zero3.has_plain_shard` holds.
        keep: is given each parameter with the shards of all ranks, padding included, one per row.
    """
    from deepspeed.runtime.zero import partition_parameters

    first = params[0]
    group, shards = first.ds_process_group, [param.ds_tensor for param in params]
    columns = [shard.ds_numel for shard in shards]
    received = torch.empty(dist.get_world_size(group), sum(columns), dtype=dtype, device=first.device)
    own = received[dist.get_rank(group)]
    torch._foreach_copy_(own.split(columns), shards, non_blocking=True)  # from the host, too
    work = partition_parameters._dist_allgather_fn(own, received.view(-1), group)

    def wait() -> list[tuple[Any, torch.Tensor]]:
        work.wait()  # in no generator, which would hide from errors who waits
        return unpack(params, columns, received, keep)

    return wait


def gather_copied(param: Any, shard: torch.Tensor) -> torch.Tensor:
    """Return the values of ``param`` from all ranks' copies of their shards; ``shard`` is this rank's. Collective."""
    shard.ds_numel = shard.numel()  # type: ignore[attr-defined]
    with replaced(param, "ds_tensor", shard):
        ((_, full),) = gather_shards([param], shard.dtype)()
    return full


def unpack(
    params: Iterable[Any], columns: Sequence[int], received: torch.Tensor,
    keep: Callable[[Any, torch.Tensor], None] | None = None,
) -> list[tuple[Any, torch.Tensor]]:  # fmt: skip
    """Return ``params`` with their values, each so many columns, the last dimension of ``received``."""
    values, begin = [], 0
    for param, width in zip(params, columns, strict=True):
        shards = received.narrow(-1, begin, width)
        if keep is not None:
            keep(param, shards)
        # A column of its own is a view with steps, which those who send a parameter as bytes refuse.
        full = shards.contiguous().view(-1).narrow(0, 0, param.ds_numel).view(param.ds_shape)
        values.append((param, full if full.dtype is param.ds_tensor.dtype else full.to(param.ds_tensor.dtype)))
        begin += width
    return values


def unshard(params: Iterable[Any], wait: Arrival) -> Callable[[], None]:
    """``wait`` is the arrival of ``params``, released so far; return what waits and gives them their values."""
    for param in params:
        param._zerosync_record.unshard()

    @for_training
    def arrive() -> None:
        for param, full in wait():
            param._zerosync_record.arrive(full)

    return arrive


@for_training
def unshard_from_host(values: Mapping[Any, list[torch.Tensor]]) -> Callable[[], None]:
    """As :func:`unshard`, of parameters that this rank has in full elsewhere: nothing is sent.

    ``values``, in full, flat and in parts, by sharded parameter, are copied on the current stream.
    """
    copies = {}
    for param, parts in values.items():
        copies[param] = full = torch.empty(param.ds_shape, dtype=parts[0].dtype, device=param.device)
        torch._foreach_copy_(full.view(-1).split([part.numel() for part in parts]), parts, non_blocking=True)
        param._zerosync_record.unshard()

    def arrive() -> None:
        for param, copy in copies.items():
            param._zerosync_record.arrive(copy)

    return arrive


def gather_empty(param: Any) -> bool:
    """Gather ``param`` if it has no elements; return whether. DeepSpeed gathers none alone, and then misses it."""
    if param.ds_numel == 0:
        with zero3.as_it_is():
            record_of(param).unshard()
            record_of(param).arrive(param.data.new_empty(param.ds_shape))
    return bool(param.ds_numel == 0)


def gathers_plainly(engine: Any) -> bool:
    """Return whether DeepSpeed gathers several parameters by one all-gather of values."""
    config = engine._config.zero_config
    one_by_one = contract.has(contract.SEQUENTIAL_GATHERS) and config.allgather_sequential
    return not (config.use_all_reduce_for_fetch_params or config.zero_quantized_weights or one_by_one)


def count_gathered(coordinator: Any, params: Iterable[Any], sign: int = 1) -> None:
    """Count ``params`` among those that DeepSpeed has gathered and has to release: more of them, or fewer."""
    numel = getattr(coordinator, contract.GATHERED_NUMEL)
    setattr(coordinator, contract.GATHERED_NUMEL, numel + sign * sum(param.ds_numel for param in params))


def fetch(coordinator: Any, params: list[Any]) -> list[Any]:
    """Gather released ``params`` as DeepSpeed's coordinator does, but return the handles: it will not release them."""
    getattr(coordinator, contract.ALL_GATHER_PARAMS)(params, True)
    count_gathered(coordinator, params, -1)
    found = [handle for handle, _ in handles(coordinator, params)]
    for param in params:
        del in_flight(coordinator)[param]
    return found


def release(coordinator: Any, param: Any) -> bool:
    """Release ``param`` if it is gathered and nothing uses it, as DeepSpeed's coordinator does, in fewer calls.

    Return whether that was all: not where the shard is on disk, quantized or of hpZ.
    """
    if param.ds_status._name_ != "AVAILABLE" or param.ds_active_sub_modules:
        return True
    record = record_of(param)
    if not record.plain:
        return False
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return release(coordinator, param)
    record.reshard()
    numel = getattr(coordinator, contract.GATHERED_NUMEL)
    setattr(coordinator, contract.GATHERED_NUMEL, numel - param.ds_numel)
    return True


def prefetched_numel(engine: Any) -> int:
    """Return the elements that DeepSpeed gathers ahead of their use."""
    return int(engine._config.zero_config.prefetch_bucket_size)


def gathering_by(all_gather: Callable[..., Any]) -> AbstractContextManager[None]:
    """While active, DeepSpeed gathers parameters by ``all_gather(source, target, process_group)``.

    That is called with this rank's shard and the place for all shards, both flat, and returns what has ``wait()``.
    """
    from deepspeed.runtime.zero import partition_parameters

    return replaced(partition_parameters, "_dist_allgather_fn", all_gather)


def gathers_by_all_reduce(engine: Any) -> bool:
    """Return whether DeepSpeed gathers parameters by summing each rank's shard and zeros."""
    return bool(engine._config.zero_config.use_all_reduce_for_fetch_params)


def in_flight(coordinator: Any) -> dict[Any, Any]:
    """Return DeepSpeed's handles of the gathers that nobody has waited for yet, by parameter."""
    return getattr(coordinator, contract.IN_FLIGHT).data  # past the checks of its __setitem__


def handles(coordinator: Any, params: Iterable[Any]) -> Iterable[tuple[Any, list[Any]]]:
    """Return each handle of gathers in flight that ``params`` have, with those of them that it gathers."""
    by_id: dict[int, tuple[Any, list[Any]]] = {}
    for param in params:
        handle = in_flight(coordinator)[param]
        by_id.setdefault(id(handle), (handle, []))[1].append(param)
    return by_id.values()


def release_cache(coordinator: Any) -> Any:
    """Return the ``lru_cache`` of what is released after which module, below DeepSpeed's decorators."""
    function = getattr(type(coordinator), contract.RELEASES)
    while not hasattr(function, "cache_clear"):
        inner = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        function = next((found for found in inner if callable(found)), None)
        if function is None:
            raise contract.changed("held parameters", f"{contract.RELEASES} is not cached")
    return function


def release_leftovers(coordinator: Any) -> None:
    """Let DeepSpeed release what the modules of a backward that raised have left gathered, where it knows them."""
    if contract.has(contract.LEFTOVERS):
        coordinator.release_backward_leftovers()


def parameters_of(module: Any) -> list[Any]:
    """Return the parameters that are gathered for ``module``: its own; of a leaf to ZeRO-3, also those below it."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params, z3_leaf_module

    return list(iter_params(module, recurse=z3_leaf_module(module)))


def modules_of(module: Any) -> Iterable[Any]:
    """Return the modules whose own parameters :func:`parameters_of` returns."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import z3_leaf_module

    return module.modules() if z3_leaf_module(module) else (module,)


def forget_order(optimizer: Any) -> None:
    """Let DeepSpeed record anew in which order modules run, and release what it has prefetched."""
    found = coordinator(optimizer)
    if not found.is_invalid_trace():
        found._invalidate_trace()


def release_but(coordinator: Any, module: torch.nn.Module, kept: Collection[Any]) -> None:
    """Release all parameters of ``module`` but for ``kept``, as before an optimizer step."""
    in_flight_now = in_flight(coordinator)
    param: Any
    for param in module.parameters():
        if zero3.is_sharded(param) and param not in kept:
            if (handle := in_flight_now.pop(param, None)) is not None:
                handle.wait()
            param.ds_active_sub_modules.clear()
            release_param(coordinator, param)


def release_param(coordinator: Any, param: Any) -> None:
    """Release ``param`` as the coordinator does."""
    getattr(coordinator, contract.RELEASE_PARAM)(param)


def release_all(optimizer: Any, module: torch.nn.Module, keeps: Callable[[Any], bool]) -> None:
    """After an exception: release what is gathered of ``module``, but not what persists, a context has or ``keeps``."""
    forget_order(optimizer)
    release_leftovers(coordinator(optimizer))
    for submodule in module.modules():
        if hasattr(submodule._parameters, "_in_forward"):
            submodule._parameters._in_forward = False
    for param in module.parameters():
        _release(param, keeps)


def _release(param: Any, keeps: Callable[[Any], bool]) -> None:
    if not zero3.is_sharded(param) or not zero3.is_gathered(param):
        return
    param.ds_active_sub_modules.clear()
    if not (param.ds_persist or keeps(param) or Claim.CONTEXT in record_of(param).claims):
        param.partition()


def restrict(engine: Any, first: Any, part: torch.nn.Module) -> None:
    """Let the optimizer of ``engine`` release, and gather again after its step, the parameters of ``part`` alone.

    ``first`` is the engine whose hooks run in the module that is trained; may be ``engine`` itself.
    """
    from deepspeed.runtime.zero import partition_parameters

    contract.require(contract.SEVERAL_ENGINES, engine)
    contract.require(contract.SEVERAL_ENGINES, first)
    optimizer, params = engine.optimizer, set(part.parameters())
    offload, first_offload = optimizer.parameter_offload, first.optimizer.parameter_offload
    for module in part.modules():
        partition_parameters._init_external_params(module)  # what an engine's own module has been given
    offload.module = optimizer.module = part
    persistent = [param for param in optimizer.persistent_parameters if param in params]
    offload.persistent_parameters = optimizer.persistent_parameters = persistent
    offload.param_coordinator = first_offload.param_coordinator
    setattr(offload, contract.OFFLOAD_GATHER_STREAM, getattr(first_offload, contract.OFFLOAD_GATHER_STREAM))


def leave_sharded(engine: Any) -> None:
    """End ``engine``; another may train its module, whose parameters stay sharded."""
    engine.destroy()
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()


@contextmanager
def loading_without_optimizer(engine: Any) -> Iterator[None]:
    """Around ``load_checkpoint`` of an engine that has no optimizer; see :class:`InferenceOverrides`."""
    contract.require(contract.EVALUATION)
    interpose(engine.optimizer, InferenceOverrides)
    try:
        yield
    finally:
        restore(engine.optimizer, InferenceOverrides)


def release_for_checkpoint(optimizer: Any) -> None:
    """Release the optimizer's parameters, as DeepSpeed does before it saves or loads."""
    optimizer.checkpoint_event_prologue()
