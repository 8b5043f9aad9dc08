"""The class of a ZeRO-3 parameter: its own while a module uses it, another at rest, which sees who reads it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from zerosync_strategy.core.engine import contract, gather_contexts, zero3


def for_training(method: Callable[..., Any]) -> Callable[..., Any]:
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

    @for_training
    def wait(self, *args: Any, **kwargs: Any) -> None:
        with zero3.as_it_is():
            self._handle.wait(*args, **kwargs)


class Users(set[Any]):
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
            self._writes = zero3.shard_writes(self._param)
        set.add(self, user)
        self._param.__class__ = self.own

    def changed_it(self) -> bool | torch.Tensor:
        """Return whether the gathered values are other than those that the users found; unseen if not watched.

        What goes through ``.data`` leaves no trace but the values. All ranks' own parts are all of them, so each rank
        has an answer of its own, in a tensor: the host need not wait for it.
        """
        param = self._param
        if param._version != self.version:
            return True
        if not self.watched or self._writes != zero3.shard_writes(param):
            return False  # or the shards are newer
        if zero3.has_secondary_shard(param) or not zero3.has_plain_shard(param):
            return False
        if zero3.gather_dtype(param) is not param.ds_tensor.dtype:
            return False  # the values are not those of the shards, to the bit
        if param.shape != param.ds_shape:
            return True
        pair = zero3.own_part(param)
        if pair is None:
            return param.new_zeros((), dtype=torch.bool)
        shard, part = pair
        return shard.to(part.device, non_blocking=True).ne(part).any()

    def discard(self, user: Any) -> None:
        set.discard(self, user)
        self.settle()

    def settle(self) -> None:
        """Give the parameter the class that is right for who uses it."""
        param = self._param
        attributes = param.__dict__
        if self or zero3.CONTEXT_DEPTH in attributes:
            return
        stays = param.ds_persist or ("_zerosync_held" in attributes and attributes["_zerosync_held"])
        param.__class__ = self.own if stays and zero3.is_gathered(param) else self.at_rest

    def clear(self) -> None:
        set.clear(self)
        self.discard(None)


_STOCK = "_zerosync_stock_gathers"


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

    @for_training
    def all_gather_coalesced(*args: Any, **kwargs: Any) -> Any:
        # Hooks of engines that are not attached, replaced or without an optimizer, gather by this too, and wait.
        with zero3.as_it_is():
            return _Handle(stock[2](*args, **kwargs))

    @for_training
    def all_gather(param_list: Any = None, async_op: bool = False, hierarchy: int = 0) -> Any:
        params = [param] if param_list is None else param_list
        with zero3.as_it_is():
            handles = _gather_whole(stock[0], params, async_op, hierarchy)
        for gathered in params:
            users = gathered.ds_active_sub_modules
            if users.__class__ is Users and zero3.is_gathered(gathered):
                gathered.__class__ = users.own
        return handles

    def partition(param_list: Any = None, hierarchy: int = 0, has_been_updated: bool = False, **kwargs: Any) -> None:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return partition(param_list, hierarchy, has_been_updated, **kwargs)
        with zero3.as_it_is():
            params = [param] if param_list is None else param_list
            _forget_leftover_users(params)
            staying = set()
            for released in params:
                users = released.ds_active_sub_modules
                suspect = users.__class__ is Users and (users.watched or users.version != released._version)
                if not has_been_updated and (suspect or zero3.stays(released)) and zero3.is_gathered(released):
                    releasing(released)
                    if gather_contexts.reading_ends and released.__dict__.get("_zerosync_held", False):
                        staying.add(released)
            params = [released for released in params if released not in staying]
            if params:
                stock[1](params, hierarchy, has_been_updated, **kwargs)
            for released in params:
                users = released.ds_active_sub_modules
                if users.__class__ is Users:
                    if has_been_updated:
                        zero3.count_write(released)
                        written(released)
                        users.version = released._version
                    if not users:
                        released.__class__ = users.at_rest

    param.all_gather, param.partition, param.all_gather_coalesced = all_gather, partition, all_gather_coalesced
    param.__dict__[_STOCK] = stock
    users = param.ds_active_sub_modules = Users(param, at_rest, releasing)
    if not users and not (param.ds_persist and zero3.is_gathered(param)):
        param.__class__ = at_rest


def take_class_at_rest(param: Any) -> None:
    """Undo :func:`give_class_at_rest`."""
    _forget_leftover_users((param,))
    param.__class__ = param.ds_active_sub_modules.own
    param.ds_active_sub_modules = set(param.ds_active_sub_modules)
    param.all_gather, param.partition, param.all_gather_coalesced = param.__dict__.pop(_STOCK)


def changed_in_use(param: Any) -> bool | torch.Tensor:
    """Return whether the modules that used a gathered ``param`` have written to it; to be asked once, at release.

    Where only the values say so, the answer is this rank's, on the device.
    """
    users = param.ds_active_sub_modules
    changed: bool | torch.Tensor = users.changed_it()
    users.version = param._version
    return changed


def forget_changes(param: Any) -> None:
    """What modules have written to a gathered ``param`` is taken care of."""
    param.ds_active_sub_modules.version = param._version


def watch(params: Iterable[Any], watched: bool) -> None:
    """Compare the values of ``params`` with their shards whenever they are released, or no longer."""
    for param in params:
        param.ds_active_sub_modules.watched = watched


def mark_held(params: Iterable[Any], held: bool) -> None:
    """Let readers of ``params`` know that they keep their values until the step, or no longer."""
    for param in params:
        param._zerosync_held = held
    have_arrived(params)


def have_arrived(params: Iterable[Any]) -> None:
    """``params`` may have their values now, without a module of DeepSpeed's that uses them."""
    for param in params:
        if param.ds_active_sub_modules.__class__ is Users:
            param.ds_active_sub_modules.settle()


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


def gather_whole(params: Iterable[Any]) -> None:
    """Let ``params`` of an engine that is not attached arrive when several are gathered at once."""
    if contract.has(contract.WHOLE_GATHER):
        return
    for param in filter(zero3.is_sharded, params):
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
