"""ZeRO-3: its parameters, what gathers and releases them, and where the optimizer keeps gradients.

The first part works on any parameter: one that ZeRO-3 does not shard has its values, its own shape and no group.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zerosync_strategy.core.engine import contract
from zerosync_strategy.core.engine.zero import MasterWeights, offloads, sum_of_squares

# ---- one parameter ---------------------------------------------------------------------------------------------------


def is_sharded(param: Any) -> bool:
    """Return whether ``param`` is a parameter of ZeRO-3, gathered or not."""
    return hasattr(param, "ds_id")


def param_id(param: Any) -> int:
    """Return the number of ``param`` in the order in which parameters were built; 0 without ZeRO-3."""
    try:
        number: int = param.ds_id
    except AttributeError:
        number = 0
    return number


def full_shape(param: Any) -> tuple[int, ...]:
    """Return the shape of ``param`` when it is gathered."""
    return tuple(param.ds_shape if is_sharded(param) else param.shape)


def full_numel(param: Any) -> int:
    """Return the elements of ``param`` when it is gathered."""
    try:
        numel: int = param.ds_numel
    except AttributeError:
        numel = param.numel()
    return numel


def full_bytes(param: Any) -> int:
    """Return the bytes of ``param`` when it is gathered."""
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
    """Return whether DeepSpeed keeps ``param`` gathered for good."""
    try:
        persists: bool = param.ds_persist
    except AttributeError:
        persists = False
    return persists


def is_gathered(param: Any) -> bool:
    """Return whether ``param`` has its values: neither released nor still on its way."""
    try:
        return bool(param.ds_status._name_ == "AVAILABLE")
    except AttributeError:
        return True


def all_gathered(params: Iterable[Any]) -> bool:
    """Return whether all ``params``, of ZeRO-3, have their values."""
    for param in params:  # noqa: SIM110  # no calls: this runs for every module
        if param.ds_status._name_ != "AVAILABLE":
            return False
    return True


def is_released(param: Any) -> bool:
    """Return whether ``param`` is neither gathered nor on its way."""
    return bool(param.ds_status._name_ == "NOT_AVAILABLE")


def shard_writes(param: Any) -> int:
    """Return how often the shards of ``param`` were written, but for optimizer steps and checkpoints."""
    writes: int = param.__dict__.get(_WRITES, 0)
    return writes


def _count_write(param: Any) -> None:
    param.__dict__[_WRITES] = shard_writes(param) + 1


_WRITES = "_zerosync_shard_writes"


def mark_kept(params: Iterable[Any], kept: bool) -> None:
    """Mark parameters that are gathered before every use and kept to the step, from one window to the next."""
    for param in params:
        param._zerosync_kept = kept


def mark_held(params: Iterable[Any], held: bool) -> None:
    """Let readers of ``params`` know that they keep their values until the step, or no longer."""
    for param in params:
        param._zerosync_held = held
    have_arrived(params)


def have_arrived(params: Iterable[Any]) -> None:
    """``params`` may have their values now, without a module of DeepSpeed's that uses them."""
    for param in params:
        if param.ds_active_sub_modules.__class__ is _Users:
            param.ds_active_sub_modules.settle()


def is_in_use(param: Any) -> bool:
    """Return whether ``param`` has its values, and keeps them for a reader's backward.

    So do a module's own parameters while its forward or backward runs, held and persistent ones; where no backward
    follows, those of a user's ``GatheredParameters`` context, too. Others may be there by chance, prefetched or not yet
    released, and gone by then.
    """
    try:
        status = param.ds_status
    except AttributeError:
        return True
    return bool(
        status._name_ == "AVAILABLE"
        and (
            param.ds_active_sub_modules
            or param.ds_persist
            or getattr(param, "_zerosync_held", False)
            or (_CONTEXT_DEPTH in param.__dict__ and not torch.is_grad_enabled())
        )
    )


@contextmanager
def in_full_shape(param: Any) -> Iterator[None]:
    """While active, a parameter has its shape, released or not: autograd wants it so when it is given a gradient."""
    with as_it_is():
        if param.numel() > 0 or not hasattr(param, "ds_shape"):
            yield
            return
        data, param.data = param.data, param.data.new_empty(()).expand(param.ds_shape)
        try:
            yield
        finally:
            param.data = data


@contextmanager
def accepting_gradients(params: Iterable[Any]) -> Iterator[None]:
    """While active, ``param.grad = ...`` and ``param.grad *= ...`` work on released parameters, which read as NaN."""
    placeholders = []
    with as_it_is():
        for param in params:
            if param.numel() == 0 and full_numel(param) > 0:
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


def gather(param: Any) -> torch.Tensor:
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


# ---- parameters at rest ----------------------------------------------------------------------------------------------


as_it_is = torch._C.DisableTorchFunctionSubclass
"""A context in which a parameter at rest is what DeepSpeed has left of it."""


def _for_training(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``method`` give parameters memory that can be trained with, in torch's inference mode too."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return call


class _Handle:
    """DeepSpeed's handle of a gather, which gives parameters their values when it is waited for."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @_for_training
    def wait(self, *args: Any, **kwargs: Any) -> None:
        with as_it_is():
            self._handle.wait(*args, **kwargs)


class _Users(set[Any]):
    """DeepSpeed's set of the modules that use a parameter now: with the first the parameter gets its own class back."""

    def __init__(self, param: Any, at_rest: type, releasing: Callable[[Any], None]) -> None:
        super().__init__(param.ds_active_sub_modules)
        self.releasing = releasing
        self.version = param._version
        self.watched = True
        self._writes = -1
        self._param = param
        self.own, self.at_rest = type(param), at_rest

    def add(self, user: Any) -> None:
        if self.watched and not self:
            self._writes = shard_writes(self._param)
        set.add(self, user)
        self._param.__class__ = self.own

    def changed_it(self) -> bool:
        """Return whether the gathered values are other than those that the users found; unseen if not watched.

        What goes through ``.data`` leaves no trace but the values. All ranks' own parts are all of them.
        """
        param = self._param
        if param._version != self.version:
            return True
        if not self.watched or self._writes != shard_writes(param):
            return False  # or the shards are newer
        if has_secondary_shard(param) or not has_plain_shard(param) or gather_dtype(param) is not param.ds_tensor.dtype:
            return False  # the values are not those of the shards, to the bit
        if param.shape != param.ds_shape:
            return True
        pair = own_part(param)
        return pair is not None and not torch.equal(*pair)

    def discard(self, user: Any) -> None:
        set.discard(self, user)
        self.settle()

    def settle(self) -> None:
        """Give the parameter the class that is right for who uses it."""
        param = self._param
        attributes = param.__dict__
        if self or param.ds_persist or _CONTEXT_DEPTH in attributes:
            return
        is_held = "_zerosync_held" in attributes and attributes["_zerosync_held"] and is_gathered(param)
        param.__class__ = self.own if is_held else self.at_rest

    def clear(self) -> None:
        set.clear(self)
        self.discard(None)


_STOCK = "_zerosync_stock_gathers"
_CONTEXT_DEPTH = "_ds_z3_gathered_param_context_depth"


def give_class_at_rest(
    param: Any, at_rest: type, releasing: Callable[[Any], None], written: Callable[[Any], None]
) -> None:
    """From now on ``param`` has the class ``at_rest`` while nobody uses it who says when it is to be released.

    Args:
        releasing: called before a parameter is released that may have been changed, which DeepSpeed would forget; in
            :data:`as_it_is`.
        written: called when a release has written a parameter to its shards.
    """
    stock = param.all_gather, param.partition, param.all_gather_coalesced

    @_for_training
    def all_gather_coalesced(*args: Any, **kwargs: Any) -> Any:
        # Hooks of engines that are not attached, replaced or without an optimizer, gather by this too, and wait.
        with as_it_is():
            return _Handle(stock[2](*args, **kwargs))

    @_for_training
    def all_gather(param_list: Any = None, async_op: bool = False, hierarchy: int = 0) -> Any:
        params = [param] if param_list is None else param_list
        with as_it_is():
            handles = _gather_whole(stock[0], params, async_op, hierarchy)
        for gathered in params:
            users = gathered.ds_active_sub_modules
            if users.__class__ is _Users and is_gathered(gathered):
                gathered.__class__ = users.own
        return handles

    def partition(param_list: Any = None, hierarchy: int = 0, has_been_updated: bool = False, **kwargs: Any) -> None:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return partition(param_list, hierarchy, has_been_updated, **kwargs)
        with as_it_is():
            params = [param] if param_list is None else param_list
            _forget_leftover_users(params)
            staying = set()
            for released in params:
                users = released.ds_active_sub_modules
                suspect = users.__class__ is _Users and (users.watched or users.version != released._version)
                if not has_been_updated and (suspect or stays(released)) and is_gathered(released):
                    releasing(released)
                    if _reading_ends and released.__dict__.get("_zerosync_held", False):
                        staying.add(released)
            params = [released for released in params if released not in staying]
            if params:
                stock[1](params, hierarchy, has_been_updated, **kwargs)
            for released in params:
                users = released.ds_active_sub_modules
                if users.__class__ is _Users:
                    if has_been_updated:
                        _count_write(released)
                        written(released)
                        users.version = released._version
                    if not users:
                        released.__class__ = users.at_rest

    param.all_gather, param.partition, param.all_gather_coalesced = all_gather, partition, all_gather_coalesced
    param.__dict__[_STOCK] = stock
    users = param.ds_active_sub_modules = _Users(param, at_rest, releasing)
    if not users and not (param.ds_persist and is_gathered(param)):
        param.__class__ = at_rest


def stays(param: Any) -> bool:
    """Return whether ``param`` keeps its values between modules: it is persistent, or held."""
    return bool(param.ds_persist or param.__dict__.get("_zerosync_held", False))


def changed_in_use(param: Any) -> bool:
    """Return whether the modules that used a gathered ``param`` have written to it; to be asked once, at release."""
    users = param.ds_active_sub_modules
    changed: bool = users.changed_it()
    users.version = param._version
    return changed


def watch(params: Iterable[Any], watched: bool) -> None:
    """Compare the values of ``params`` with their shards whenever they are released, or no longer."""
    for param in params:
        param.ds_active_sub_modules.watched = watched


def leave_sharded(engine: Any) -> None:
    """End ``engine``, which has no optimizer; another may train its module, whose parameters stay sharded."""
    engine.destroy()
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()


def gather_whole(params: Iterable[Any]) -> None:
    """Let ``params`` of an engine that is not attached arrive when several are gathered at once."""
    if contract.has(contract.WHOLE_GATHER):
        return
    for param in filter(is_sharded, params):
        param.all_gather = functools.partial(_gather_whole_by_default, param, param.all_gather)


def _gather_whole_by_default(
    param: Any, stock: Callable[..., Any], param_list: Any = None, async_op: bool = False, hierarchy: int = 0
) -> Any:
    return _gather_whole(stock, [param] if param_list is None else param_list, async_op, hierarchy)


def _gather_whole(stock: Callable[..., Any], params: Any, async_op: bool, hierarchy: int) -> Any:
    """Gather ``params`` as ``stock`` does, and wait for all of them.

    Of several, releases before ``WHOLE_GATHER`` wait for the last alone, which is not enough off NCCL.
    """
    on_cpu = bool(params) and params[0].device.type == "cpu"
    one_by_one = on_cpu and not async_op and not contract.has(contract.WHOLE_GATHER)
    handles = None
    for part in [[each] for each in params] if one_by_one else [params]:
        handles = stock(part, async_op, hierarchy)
    return handles


def _forget_leftover_users(params: Iterable[Any]) -> None:
    """Outside of forwards and backwards no module uses ``params``.

    Releases before ``LEFTOVERS`` take a module that is fed without a gradient for one in its backward until the step,
    and refuse to release its parameters.
    """
    if contract.has(contract.LEFTOVERS) or torch._C._current_graph_task_id() != -1:
        return
    for param in params:
        if not getattr(param._z3_optimizer.module._parameters, "_in_forward", False):
            param.ds_active_sub_modules.clear()


def keep(param: Any) -> None:
    """Let this rank's shard of a gathered parameter have its present values."""
    _count_write(param)
    if (pair := own_part(param)) is not None:
        shard, part = pair
        shard.copy_(part)


def take_class_at_rest(param: Any) -> None:
    """Undo :func:`give_class_at_rest`."""
    _forget_leftover_users((param,))
    param.__class__ = param.ds_active_sub_modules.own
    param.ds_active_sub_modules = set(param.ds_active_sub_modules)
    param.all_gather, param.partition, param.all_gather_coalesced = param.__dict__.pop(_STOCK)


def answer_of_gathered(name: str, param: Any) -> Any:
    """Return what a gathered ``param`` answers to those who ask whether it is.

    Raises:
        AttributeError: ``name`` is none of that.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    if name == "ds_status":
        return ZeroParamStatus.AVAILABLE
    if name in ("ds_shape", "ds_numel"):
        return getattr(param, name)
    raise AttributeError(f"{type(param).__name__!r} object has no attribute {name!r}")


def write(param: Any, full: torch.Tensor) -> bool:
    """Give ``param`` the values ``full``: this rank's shard of it, and what is gathered of it.

    Returns:
        Whether that is possible: not where the shard is in no memory, quantized, or not the only one.
    """
    shard = param.ds_tensor
    if shard.numel() == 0 or hasattr(shard, "ds_quant_scale") or has_secondary_shard(param):
        return False
    _count_write(param)
    if (pair := own_part(param, full)) is not None:
        own, part = pair
        own.copy_(part)
    if is_gathered(param) and param.data_ptr() != full.data_ptr():
        param.data.copy_(full)
    return True


# ---- the process group of a parameter --------------------------------------------------------------------------------


def shard_over(param: Any, group: Any) -> None:
    """Let ZeRO-3 shard ``param``, still whole, over ``group``, with the values of its first rank.

    Raises:
        ContractError: this release of DeepSpeed shards all parameters over the same ranks.
    """
    contract.need(contract.PARAM_GROUP, "leave shard_over() out")
    param.ds_zero_partition_process_group = group
    # Or the engine would give all ranks the values of rank 0 first. DeepSpeed's mark of weights that differ by rank.
    param.ds_optim_param = True


def has_own_group(param: Any) -> bool:
    """Return whether :func:`shard_over` or DeepSpeed has chosen the process group of this one parameter."""
    return hasattr(param, "ds_zero_partition_process_group")


def has_secondary_shard(param: Any) -> bool:
    """Return whether ZeRO-3 keeps ``param`` a second time, sharded over the ranks of a node (hpZ)."""
    return getattr(param, "ds_zero_param_process_group", None) is not None


def wrap_zero_init(check: Callable[[Any, Any], None]) -> None:
    """From now on in this process, call ``check(inner group, outer group)`` where a ``zero.Init`` is nested.

    It is called where the inner one is enabled and was given a process group of fewer ranks than all.
    """
    from deepspeed import zero
    from deepspeed.runtime.zero import partition_parameters

    contract.require(contract.NESTED_ZERO_INIT)
    if getattr(zero.Init.__enter__, "zerosync", False):
        return
    stock = zero.Init.__enter__

    @functools.wraps(stock)
    def enter(init: Any) -> Any:
        outer = partition_parameters.top_level_context
        if init.enabled and outer is not None and init.dp_world_size < dist.get_world_size():
            check(init.ds_process_group, outer.ds_process_group)
        return stock(init)

    enter.zerosync = True  # type: ignore[attr-defined]
    zero.Init.__enter__ = enter


# ---- gathering and releasing -----------------------------------------------------------------------------------------


def coordinator(optimizer: Any) -> Any:
    """Return what gathers and releases the parameters of a ZeRO-3 optimizer."""
    return optimizer.parameter_offload.get_param_coordinator()


def gather_stream(coordinator: Any) -> Any:
    """Return the stream on which DeepSpeed gathers and waits for gathers; ``None`` on a device without streams."""
    return getattr(coordinator, contract.GATHER_STREAM)


@contextmanager
def gathering_on(coordinator: Any, stream: Any) -> Iterator[None]:
    """While active, DeepSpeed gathers and waits for gathers on ``stream``."""
    before = getattr(coordinator, contract.GATHER_STREAM)
    setattr(coordinator, contract.GATHER_STREAM, stream)
    try:
        yield
    finally:
        setattr(coordinator, contract.GATHER_STREAM, before)


class ShardRows:
    """All shards of several parameters of one process group, by one message.

    DeepSpeed's own gather puts a parameter together from each rank's part of it. This one does work that does not grow
    with the number of ranks: row r of what is received has the shards of rank r, and a parameter is a range of columns.

    Args:
        params: released ones, with shards of one dtype, for which :func:`has_plain_shard` holds.
        dtype: in which they are sent.
    """

    @_for_training
    def __init__(self, params: Sequence[Any], dtype: torch.dtype) -> None:
        from deepspeed.runtime.zero import partition_parameters

        first = params[0]
        group, shards = first.ds_process_group, [param.ds_tensor for param in params]
        self._params = params
        self._columns = [shard.ds_numel for shard in shards]
        self._rows = torch.empty(dist.get_world_size(group), sum(self._columns), dtype=dtype, device=first.device)
        own = self._rows[dist.get_rank(group)]
        if any(shard.device != own.device or shard.dtype is not dtype for shard in shards):
            shards = [shard.to(own.device, dtype) for shard in shards]
        torch.cat(shards, out=own)
        self._work = partition_parameters._dist_allgather_fn(own, self._rows.view(-1), group)

    def values(self) -> list[tuple[Any, torch.Tensor]]:
        """Wait, and return each parameter with its values in its own shape and dtype. The memory is the caller's."""
        self._work.wait()  # in no generator, which would hide from errors who waits
        values, begin = [], 0
        for param, columns in zip(self._params, self._columns, strict=True):
            full = self._rows.narrow(1, begin, columns).reshape(-1).narrow(0, 0, param.ds_numel).view(param.ds_shape)
            values.append((param, full if full.dtype is param.ds_tensor.dtype else full.to(param.ds_tensor.dtype)))
            begin += columns
        return values


class ShardGather:
    """The gather of several parameters of one process group: one message, and one copy for each parameter.

    Args:
        params: as :class:`ShardRows` takes.
    """

    def __init__(self, params: Sequence[Any]) -> None:
        from deepspeed.runtime.zero import partition_parameters

        self._params = params
        self._rows: ShardRows | None = ShardRows(params, gather_dtype(params[0]))
        for param in params:
            param.ds_status = partition_parameters.ZeroParamStatus.INFLIGHT

    @_for_training
    def wait(self, **_: Any) -> None:
        """Wait for it, and give the parameters their values."""
        if self._rows is None:
            return
        status = type(self._params[0].ds_status).AVAILABLE
        for param, full in self._rows.values():
            param.data = full
            param.ds_status = status
        self._rows = None


class LocalGather:
    """What a :class:`ShardGather` is, of parameters that this rank has in full elsewhere: nothing is sent.

    Args:
        values: in full, by released parameter. They are copied, on the current stream.
    """

    @_for_training
    def __init__(self, values: Mapping[Any, torch.Tensor]) -> None:
        from deepspeed.runtime.zero import partition_parameters

        self._copies = {param: full.to(param.device, non_blocking=True, copy=True) for param, full in values.items()}
        for param in self._copies:
            param.ds_status = partition_parameters.ZeroParamStatus.INFLIGHT

    def wait(self, **_: Any) -> None:
        """Give the parameters their values."""
        for param, copy in self._copies.items():
            param.data = copy
            param.ds_status = type(param.ds_status).AVAILABLE
        self._copies = {}


def has_plain_shard(param: Any) -> bool:
    """Return whether ``param`` is gathered from one shard of its values: neither quantized, on disk, nor of hpZ."""
    shard = param.ds_tensor
    return shard.final_location is None and param.ds_secondary_tensor is None and not hasattr(shard, "ds_quant_scale")


def gathers_plainly(engine: Any) -> bool:
    """Return whether DeepSpeed gathers several parameters by one all-gather of values."""
    config = engine._config.zero_config
    one_by_one = contract.has(contract.SEQUENTIAL_GATHERS) and config.allgather_sequential
    return not (config.use_all_reduce_for_fetch_params or config.zero_quantized_weights or one_by_one)


def gather_dtype(param: Any) -> torch.dtype:
    """Return the dtype in which ``param`` is gathered: with DeepSpeed's ``torch_autocast``, not always its own."""
    from deepspeed.runtime.zero.partition_parameters import get_allgather_dtype

    dtype: torch.dtype = get_allgather_dtype(param, param.ds_tensor)
    return dtype


def shard_dtype(param: Any) -> torch.dtype:
    """Return the dtype of the values that the ranks keep of ``param``."""
    dtype: torch.dtype = param.ds_tensor.dtype
    return dtype


def count_gathered(coordinator: Any, params: Iterable[Any], sign: int = 1) -> None:
    """Count ``params`` among those that DeepSpeed has gathered and has to release: more of them, or fewer."""
    numel = getattr(coordinator, contract.GATHERED_NUMEL)
    setattr(coordinator, contract.GATHERED_NUMEL, numel + sign * sum(param.ds_numel for param in params))


def fetch(coordinator: Any, params: list[Any]) -> list[Any]:
    """Gather released ``params`` as DeepSpeed's coordinator does, but return the handles: it will not release them."""
    getattr(coordinator, contract.ALL_GATHER_PARAMS)(params, True)
    count_gathered(coordinator, params, -1)
    registry = in_flight(coordinator)
    handles = [registry.pop(param) for param in params]
    return list({id(handle): handle for handle in handles}.values())


def release(coordinator: Any, param: Any) -> bool:
    """Release ``param`` if it is gathered and nothing uses it, as DeepSpeed's coordinator does, in fewer calls.

    Return whether that was all: not where the shard is on disk, quantized or of hpZ.
    """
    if param.ds_status._name_ != "AVAILABLE" or param.ds_active_sub_modules:
        return True
    if has_secondary_shard(param) or not has_plain_shard(param):
        return False
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return release(coordinator, param)
    users = param.ds_active_sub_modules
    is_intercepted = users.__class__ is _Users
    with as_it_is():
        if is_intercepted and (
            users.watched
            or users.version != param._version
            or param.ds_persist
            or param.__dict__.get("_zerosync_held", False)
        ):
            users.releasing(param)
        _free_param()(param)
    if is_intercepted:
        param.__class__ = users.at_rest
    numel = getattr(coordinator, contract.GATHERED_NUMEL)
    setattr(coordinator, contract.GATHERED_NUMEL, numel - param.ds_numel)
    return True


@functools.cache
def _free_param() -> Callable[[Any], None]:
    """Return DeepSpeed's function without the range in NVTX profiles, which costs the host more than the rest of it."""
    from deepspeed.runtime.zero.partition_parameters import free_param

    inside = [cell.cell_contents for cell in free_param.__closure__ or ()]
    free: Any = next((each for each in inside if getattr(each, "__name__", "") == "free_param"), free_param)
    return free


@functools.cache
def use_quick_linear() -> None:
    """From now on in this process, ZeRO-3's linear layers cost the host less.

    A layer whose weight is held is torch's own: ZeRO-3's autograd function is there for weights that are released
    before their backward.
    """
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

    quicken(LinearFunctionForZeroStage3)
    in_zero3 = LinearFunctionForZeroStage3.apply

    def apply(input: torch.Tensor, weight: Any, bias: Any = None) -> Any:
        # The same in a forward and where activation checkpointing runs it again.
        if getattr(weight, "_zerosync_kept", False) and is_gathered(weight) and not torch.compiler.is_compiling():
            return torch._C._nn.linear(input, weight, bias)
        return in_zero3(input, weight, bias)

    LinearFunctionForZeroStage3.apply = staticmethod(apply)


def quicken_module_functions(module: Any) -> None:
    """:func:`quicken` the autograd functions by which DeepSpeed finds where the backward of ``module`` is."""
    for name in ("pre_bwd_fn", "post_bwd_fn"):
        if (function := vars(module).get(name)) is not None:
            quicken(function)


def quicken(function: Any) -> None:
    """Let an autograd function be called without a search for default arguments, which costs more than the rest.

    It is given all its arguments, and no tensor of functorch's.
    """
    if "apply" in vars(function):
        return
    stock, plain = function.apply, super(torch.autograd.Function, function).apply

    def apply(*args: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return stock(*args)
        return plain(*args)

    function.apply = staticmethod(apply)


def prefetched_numel(engine: Any) -> int:
    """Return the elements that DeepSpeed gathers ahead of their use."""
    return int(engine._config.zero_config.prefetch_bucket_size)


@contextmanager
def gathering_by(all_gather: Callable[..., Any]) -> Iterator[None]:
    """While active, DeepSpeed gathers parameters by ``all_gather(source, target, process_group)``.

    That is called with this rank's shard and the place for all shards, both flat, and returns what has ``wait()``.
    """
    from deepspeed.runtime.zero import partition_parameters

    stock = partition_parameters._dist_allgather_fn
    partition_parameters._dist_allgather_fn = all_gather
    try:
        yield
    finally:
        partition_parameters._dist_allgather_fn = stock


def gathers_by_all_reduce(engine: Any) -> bool:
    """Return whether DeepSpeed gathers parameters by summing each rank's shard and zeros."""
    return bool(engine._config.zero_config.use_all_reduce_for_fetch_params)


class ContextGathers(Protocol):
    """Gathers what a ``GatheredParameters`` context is to hold."""

    def gather_for_context(self, params: Iterable[Any]) -> None:
        """Gather those of ``params`` that are this object's to gather. Collective."""


_context_gathers: weakref.WeakSet[Any] = weakref.WeakSet()


_reading_ends = False  # a GatheredParameters context that was there to read is left


def gather_contexts_by(gathers: ContextGathers) -> None:
    """Let ``gathers`` gather for the ``GatheredParameters`` contexts of this process, before DeepSpeed looks.

    A context that was there to read releases nothing that is held until the step.
    """
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    _context_gathers.add(gathers)
    stock, stock_exit = GatheredParameters.__enter__, GatheredParameters.__exit__
    if getattr(stock, "zerosync", False):
        return

    @functools.wraps(stock)
    def enter(context: Any) -> None:
        for each in list(_context_gathers) if context.enabled else ():
            each.gather_for_context(context.params)
        stock(context)

    @functools.wraps(stock_exit)
    def leave(context: Any, *error: Any) -> Any:
        global _reading_ends
        _reading_ends = context.enabled and context.src_rank is None
        try:
            return stock_exit(context, *error)
        finally:
            _reading_ends = False

    enter.zerosync = True  # type: ignore[attr-defined]
    GatheredParameters.__enter__, GatheredParameters.__exit__ = enter, leave


def gather_no_context_by(gathers: ContextGathers) -> None:
    """Undo :func:`gather_contexts_by`."""
    _context_gathers.discard(gathers)


def gather_and_hold(params: list[Any]) -> None:
    """Gather released ``params``, all of one process group, and leave them gathered. Collective."""
    params[0].all_gather_coalesced(params).wait()


def is_quantized(param: Any) -> bool:
    """Return whether DeepSpeed keeps the shards of ``param`` quantized."""
    return hasattr(param.ds_tensor, "ds_quant_scale")


def in_flight(coordinator: Any) -> dict[Any, Any]:
    """Return DeepSpeed's handles of the gathers that nobody has waited for yet, by parameter."""
    return getattr(coordinator, contract.IN_FLIGHT).data  # past the checks of its __setitem__


def release_cache(coordinator: Any) -> Any:
    """Return the ``lru_cache`` of what is released after which module, below DeepSpeed's decorators.

    Raises:
        ContractError: it is not there.
    """
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


def released_with(module: Any) -> list[Any]:
    """Return the parameters that may be released after ``module``: its own, and what its backward gathered anew."""
    return [*parameters_of(module), *getattr(module, "ds_recompute_parameters", ())]


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
        if is_sharded(param) and param not in kept:
            if (handle := in_flight_now.pop(param, None)) is not None:
                handle.wait()
            param.ds_active_sub_modules.clear()
            release_param(coordinator, param)


def release_param(coordinator: Any, param: Any) -> None:
    """Release ``param`` as the coordinator does."""
    getattr(coordinator, contract.RELEASE_PARAM)(param)


def release_all(optimizer: Any, module: torch.nn.Module, keeps: Callable[[Any], bool]) -> None:
    """After an exception: release what is gathered of ``module``.

    Persistent parameters stay, those that a user's ``GatheredParameters`` context has gathered, and what ``keeps``
    says.
    """
    forget_order(optimizer)
    release_leftovers(coordinator(optimizer))
    for submodule in module.modules():
        if hasattr(submodule._parameters, "_in_forward"):
            submodule._parameters._in_forward = False
    for param in module.parameters():
        _release(param, keeps)


def _release(param: Any, keeps: Callable[[Any], bool]) -> None:
    if not is_sharded(param) or not is_gathered(param):
        return
    param.ds_active_sub_modules.clear()
    if not (param.ds_persist or keeps(param) or _CONTEXT_DEPTH in param.__dict__):
        param.partition()


def numbering(engine: Any) -> str:
    """Return the ids of the parameters of ``engine``, in the order of its module, as ranges."""
    ids = [param_id(param) for param in engine.module.parameters()]
    breaks = [0, *(place for place in range(1, len(ids)) if ids[place] != ids[place - 1] + 1), len(ids)]
    return ", ".join(f"{ids[first]} to {ids[end - 1]}" for first, end in itertools.pairwise(breaks) if first < end)


# ---- gradients -------------------------------------------------------------------------------------------------------


def param_groups(optimizer: Any) -> list[list[Any]]:
    """Return the parameters of the optimizer, by DeepSpeed's groups."""
    return optimizer.fp16_groups


def gradient_group(optimizer: Any, param: Any) -> Any:
    """Return the process group whose ranks each keep a shard of the gradient of ``param``."""
    if not contract.has(contract.PARAM_GROUP):
        return optimizer.dp_process_group
    return optimizer._get_param_partition_group(param)


def shard_numel(param: Any) -> int:
    """Return the elements of one rank's shard of ``param`` or of its gradient, padding included."""
    return int(param.partition_numel())


def averaging_divisor(optimizer: Any, params: list[Any], world_size: int) -> float:
    """Return what a sum of the gradients of ``params`` is divided by, if ``world_size`` ranks add to it."""
    if not contract.has(contract.AVERAGED_RANKS):
        return float(world_size)
    return float(optimizer._gradient_averaging_world_size(params, world_size))


def gradient_shards(optimizer: Any) -> dict[int, torch.Tensor]:
    """Return this rank's shard of each gradient, flat, by the id of the parameter."""
    return getattr(optimizer, contract.GRADIENT_SHARDS)


def hand_over_gradients(optimizer: Any, params: Iterable[Any], joined: bool) -> None:
    """Let the coming step find the gradient shards of ``params``.

    Args:
        joined: not one by one, as DeepSpeed's own computation of their norm would have them.
    """
    shards = gradient_shards(optimizer)
    if offloads(optimizer) and contract.has(contract.STEPPED_OFFLOADED):
        optimizer._offload_boundary_param_ids = {param.ds_id for param in params}
        optimizer.zerosync_stock_finalize()
        return
    if offloads(optimizer):
        for param in params:
            key, shard = optimizer.get_param_id(param), shards[param.ds_id]
            group, offset, _ = optimizer.grad_position[key]
            optimizer.norm_for_param_grads[key] = shard.double().norm(2)
            optimizer.fp32_partitioned_groups_flat[group].grad.narrow(0, int(offset), shard.numel()).copy_(shard)
        return
    for index, group in enumerate(optimizer.fp16_groups):
        whole = _joined_shards(optimizer, index) if joined else None
        optimizer.averaged_gradients[index] = [shards[param.ds_id] for param in group] if whole is None else [whole]


def _joined_shards(optimizer: Any, index: int) -> torch.Tensor | None:
    """Return the gradient shards of a sub-group as one tensor, which its step need not copy; ``None``: they lie apart.

    DeepSpeed has made them, in this order, as parts of one buffer.
    """
    group, shards = optimizer.fp16_groups[index], gradient_shards(optimizer)
    first, last = shards[group[0].ds_id], shards[group[-1].ds_id]
    numel = optimizer.fp32_partitioned_groups_flat[index].numel()
    if last.data_ptr() + last.nbytes != first.data_ptr() + numel * first.element_size():
        return None
    return first.as_strided((numel,), (1,))


def discard_gradients(optimizer: Any) -> None:
    """Let the optimizer forget which gradient shards its step would use."""
    optimizer.averaged_gradients = {}


def gradient_norms(optimizer: Any) -> list[Any]:
    """Return the L2 norm of the gradients times the loss scale, as one. Collective."""
    norms: list[Any] = optimizer._get_norm_groups()
    return norms


def is_model_parallel(optimizer: Any) -> bool:
    """Return whether ranks that hold other parts of the model share its norm."""
    return optimizer.model_parallel_group is not None


def norm_of_shards(optimizer: Any) -> torch.Tensor:
    """Compute the norm of the gradients that were handed over, an infinity where it is not finite. Collective.

    The data-parallel ranks have the whole model, and each element of it once, over whichever of them it is sharded.
    """
    from deepspeed import comm

    shards = [shard for of_group in optimizer.averaged_gradients.values() for shard in of_group]
    square = sum_of_squares(shards)
    comm.all_reduce(square, group=optimizer.dp_process_group)
    norm = square.sqrt().float()
    return torch.where(norm.isfinite(), norm, torch.inf)


def all_parameters(optimizer: Any) -> list[Any]:
    """Return the parameters of the optimizer's module, those that it does not train included."""
    return list(optimizer.module.parameters())


# ---- weights ---------------------------------------------------------------------------------------------------------


def own_part(param: Any, full: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return this rank's shard of ``param``, flat, without padding, and the same part of ``full``.

    Without ``full``, of its gathered values. ``None`` where the shard is all padding, or is in no memory.
    """
    start = dist.get_rank(param.ds_process_group) * shard_numel(param)
    numel = min(shard_numel(param), full_numel(param) - start)
    if numel <= 0 or param.ds_tensor.numel() == 0:
        return None
    values = param.data if full is None else full
    return param.ds_tensor.data.narrow(0, 0, numel), values.reshape(-1).narrow(0, start, numel)


def set_values(param: Any, values: torch.Tensor) -> None:
    """Set ``param``, and where ZeRO-3 shards it this rank's shard, to ``values``, the same in full on all ranks."""
    if not is_sharded(param):
        param.data.copy_(values)
        return
    _count_write(param)
    if is_gathered(param):
        param.data.copy_(values)
    released, param.data = param.data, values.to(param.device, param.dtype)
    if (part := own_part(param)) is not None:
        part[0].copy_(part[1])
    param.data = released


def weights(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this rank's shards of the parameters, flat, with their master weights, where both are in memory.

    In fp32 the two may be one tensor, and are left out.
    """
    pairs = zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True)
    for shard, master in pairs:
        if shard is not None and shard.numel() == master.numel() and shard.data_ptr() != master.data_ptr():
            yield shard.data, master.data


def take_master_weights(optimizer: Any, param: Any) -> None:
    """Set this rank's shard of ``param`` to its master weights. What is gathered of it is gathered anew when needed."""
    _count_write(param)
    param.ds_tensor.data.copy_(optimizer.get_local_fp32_param(param))
    if is_gathered(param):
        persistent, param.ds_persist = param.ds_persist, False  # what is gathered is out of date, and not kept
        param.partition()
        param.ds_persist = persistent


def flat_master_weights(optimizer: Any) -> list[Any]:
    """Return what the optimizer steps, by sub-group."""
    return list(optimizer.fp32_partitioned_groups_flat)


def master_weights(optimizer: Any) -> list[MasterWeights]:
    """Return this rank's master weights of each group, by the parameters that they are of, padding included.

    Raises:
        ValueError: their states are not in memory, or another optimizer steps some of them.
    """
    if getattr(optimizer, "swap_optimizer", False) or hasattr(optimizer, "backup_optimizer"):
        raise ValueError(
            "The optimizer trains parameters that are frozen, while 'offload_optimizer' keeps its states on NVMe or has"
            " a 'ratio' below 1: ZeRO would step them. Leave them out of the optimizer, or keep its states in memory."
        )
    masters = []
    for flat, params in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
        ends = list(itertools.accumulate(map(shard_numel, params)))
        masters.append(MasterWeights(flat, list(zip(params, [0, *ends[:-1]], ends, strict=True))))
    return masters


def free_reduction_buffers(optimizer: Any) -> Callable[[], None]:
    """Free the buffers for DeepSpeed's own reductions, of ``reduce_bucket_size`` elements; return what undoes it."""
    freed = []
    for bucket in optimizer.ipg_buckets.values():
        if bucket.buffer is not None:
            freed.append((bucket, bucket.buffer.device, bucket.buffer.to("meta")))
            bucket.buffer = None

    def restore() -> None:
        for bucket, device, buffer in freed:
            bucket.buffer = torch.empty_like(buffer, device=device)

    return restore


# ---- full parameters, checkpoints, several engines -------------------------------------------------------------------


def reload_master_weights(optimizer: Any) -> None:
    """Set the weights that the optimizer steps to the present values of the parameters. Collective."""
    optimizer.refresh_fp32_params()


def release_for_checkpoint(optimizer: Any) -> None:
    """Release the optimizer's parameters, as DeepSpeed does before it saves or loads."""
    optimizer.checkpoint_event_prologue()


def restrict(engine: Any, first: Any, part: torch.nn.Module) -> None:
    """Let the optimizer of ``engine`` release, and gather again after its step, the parameters of ``part`` alone.

    Args:
        first: the engine whose hooks run in the module that is trained; may be ``engine`` itself.

    Raises:
        ContractError: DeepSpeed keeps what gathers and releases elsewhere.
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
