"""DeepSpeed's functions for parameters, wrapped: gathers and reshards, ``GatheredParameters``, access to gradients.

``safe_get_full_grad`` and its kin, by which a program reads and writes gradients and master weights, reach shards
through attributes that DeepSpeed sets on the parameter, and on ZeRO-3 also through methods of the optimizer, which
``overrides.py`` overrides.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from zerosync_strategy.core.engine import contract, deepspeed_internals, patches, zero3
from zerosync_strategy.core.engine.hooks import nodes_made
from zerosync_strategy.core.engine.parameter import CONTEXT, Record
from zerosync_strategy.core.engine.torch_internals import for_training
from zerosync_strategy.core.engine.transitions import claim, drop, free, restore_versions
from zerosync_strategy.core.engine.types import Zero3Parameter

_STOCK = "_zerosync_stock_functions"


def intercept(param: Zero3Parameter) -> None:
    """Wrap the gather and reshard functions of ``param``: they see DeepSpeed's own parameter, and settle its class.

    Before a reshard, what modules have written to the gathered values goes to the shards. The end of a context that
    only reads does not reshard held parameters.
    """
    stock = param.all_gather, param.partition, param.all_gather_coalesced

    @for_training
    def all_gather_coalesced(params: Iterable[Zero3Parameter], *args: object, **kwargs: object) -> Any:
        # Hooks of engines that are not attached, or were replaced, or have no optimizer, gather with this function too.
        with zero3.as_it_is():
            handle = stock[2](params, *args, **kwargs)
        wait = for_training(handle.wait)

        def wait_as_it_is(*args: object, **kwargs: object) -> None:
            with zero3.as_it_is():
                wait(*args, **kwargs)
                restore_versions(_records(params))

        handle.wait = wait_as_it_is
        return handle

    @for_training
    def all_gather(param_list: Any = None, async_op: bool = False, hierarchy: int = 0) -> object:
        params = [param] if param_list is None else param_list
        if not async_op:
            _gather_in_buckets(params)  # of attached engines: as a step gathers persistent parameters
        with zero3.as_it_is():
            handles = _gather_all(stock[0], params, async_op, hierarchy)
        restore_versions(gathered := zero3.gathered(_records(params)))
        for record in gathered:
            record.use()
        return handles

    @for_training
    def partition(param_list: Any = None, hierarchy: int = 0, has_been_updated: bool = False, **kwargs: object) -> None:
        params = [param] if param_list is None else param_list
        with zero3.as_it_is():
            of_ours = _records(params)
            staying = set()
            for record in of_ours:
                if not has_been_updated and zero3.is_gathered(record.param):
                    record.carry_changes()
                    if record.held and record.bits & CONTEXT:
                        staying.add(record.param)
            if resharded := [each for each in params if each not in staying]:
                stock[1](resharded, hierarchy, has_been_updated, **kwargs)
            for record in of_ours:
                if has_been_updated:
                    record.write()
                    record.forget_changes()
                if zero3.is_released(record.param):
                    free((record,), False)
                record.settle()

    param.__dict__[_STOCK] = stock
    param.all_gather, param.partition, param.all_gather_coalesced = all_gather, partition, all_gather_coalesced


def restore(param: Zero3Parameter) -> None:
    """Undo :func:`intercept`."""
    param.all_gather, param.partition, param.all_gather_coalesced = param.__dict__.pop(_STOCK)


def gather_at_once(params: Iterable[nn.Parameter]) -> None:
    """Make a gather of several ``params`` of an engine that is not attached wait for all of them.

    Every engine that evaluates a module asks for it. Attached engines do so anyway (:func:`intercept`).
    """
    if contract.has(deepspeed_internals.WHOLE_GATHER):
        return
    for param in filter(zero3.is_sharded, params):
        if _STOCK not in param.__dict__ and getattr(param.all_gather, "func", None) is not _gather_by_default:
            param.all_gather = functools.partial(_gather_by_default, param, param.all_gather)


def _gather_by_default(
    param: Zero3Parameter, stock: Callable[..., Any], param_list: Any = None, async_op: bool = False, hierarchy: int = 0
) -> object:
    return _gather_all(stock, [param] if param_list is None else param_list, async_op, hierarchy)


def _gather_all(stock: Callable[..., object], params: Any, async_op: bool, hierarchy: int) -> object:
    """Gather ``params`` as ``stock`` does, and wait for all of them.

    For several parameters, releases before ``WHOLE_GATHER`` wait only for the last, which is not enough off NCCL.
    """
    on_cpu = bool(params) and params[0].device.type == "cpu"
    one_by_one = on_cpu and not async_op and not contract.has(deepspeed_internals.WHOLE_GATHER)
    handles = None
    for part in [[each] for each in params] if one_by_one else [params]:
        handles = stock(part, async_op, hierarchy)
    return handles


# ---- contexts ----------------------------------------------------------------------------------------------------


def intercept_contexts() -> None:
    """Make ``GatheredParameters`` contexts gather in buckets and claim their parameters until they end."""
    patches.wrap(patches.ENTER_GATHERED, _enter)
    patches.wrap(patches.LEAVE_GATHERED, _leave)


def _enter(stock: Callable[[Any], None], context: Any) -> None:
    records = _records(context.params if context.enabled else ())
    with ExitStack() as stack:
        for owner in {record.owner for record in records}:
            stack.enter_context(owner.issuing.count.in_context())
        if context.enabled and _STOCK not in context.params[0].__dict__:  # else their all_gather() does so
            _gather_in_buckets(context.params)
        stock(context)
    claim(records, CONTEXT)
    context._zerosync_nodes = nodes_made()


def _leave(stock: Callable[..., object], context: Any, *error: object) -> object:
    writes = context.enabled and context.src_rank is not None
    try:
        with _broadcastable(context.params if writes else ()):
            return stock(context, *error)
    finally:
        differentiates = nodes_made() > context._zerosync_nodes  # a backward may bring gradients after the context
        records = _records(context.params if context.enabled else ())
        for record in records:
            if differentiates and record.values is not None:
                record.values.expect_gradient(record.param)
        drop(records, CONTEXT)


def _gather_in_buckets(params: Iterable[Zero3Parameter]) -> None:
    """Gather those of ``params`` that attached engines have, as their modules would. Collective."""
    records = _records(params)
    for owner in dict.fromkeys([record.owner for record in records]):
        owner.gather_and_wait([record.param for record in records if record.owner is owner])


def _records(params: Iterable[Zero3Parameter]) -> list[Record]:
    """Return the records of the parameters of attached engines in ``params``."""
    return [param._zerosync_record for param in params if "_zerosync_record" in param.__dict__]


@contextmanager
def _broadcastable(params: Iterable[Zero3Parameter]) -> Iterator[None]:
    """While active, gathered ``params`` without dimensions have one: DeepSpeed broadcasts bytes (``compat.py``)."""
    scalars = [param for param in params if param.dim() == 0]
    with zero3.as_it_is():  # on a device its class may still wait for the gather
        for param in scalars:
            param.data = param.data.view(1)
    try:
        yield
    finally:
        with zero3.as_it_is():
            for param in scalars:
                if param.numel() == 1:  # it stays gathered
                    param.data = param.data.view(())


# ---- gradients that a window keeps local -----------------------------------------------------------------------------


# safe_get_full_grad() calls get_full_hp_grad() of a parameter with this attribute, and returns the result.
_MARK = deepspeed_internals.MARKED_GRADIENT.name
_GET, _SET, _GET_VALUE, _SET_VALUE = "get_full_hp_grad", "set_full_hp_grad", "get_full_hp_param", "set_full_hp_param"
_STAGE_1_2 = frozenset({_GET, _SET, _GET_VALUE, _SET_VALUE})


def intercept_gradients(params: Iterable[nn.Parameter], hooks: Any) -> None:
    """Make DeepSpeed call ``hooks``, a ``PendingGradients``, for ``params``, until :func:`release_gradients`."""
    from deepspeed.utils.tensor_fragment import safe_get_full_grad

    if not contract.has(deepspeed_internals.MARKED_GRADIENT):
        _let_marks_be_looked_for()
    elif _MARK not in safe_get_full_grad.__code__.co_consts:
        raise contract.changed("access to shards", f"safe_get_full_grad() does not look for {_MARK!r}")
    for param in params:
        _intercept_gradient(param, hooks)


def _let_marks_be_looked_for() -> None:
    """Make ``safe_get_full_grad()`` look for marks, in this process. Else it returns the local gradient.

    Programs import the function by name, so the function object stays and gets other code.
    """
    from deepspeed.utils.tensor_fragment import safe_get_full_grad

    if patches.is_installed(patches.FULL_GRADIENT):
        return
    code, defaults = safe_get_full_grad.__code__, safe_get_full_grad.__kwdefaults__
    stock = types.FunctionType(safe_get_full_grad.__code__, safe_get_full_grad.__globals__)

    def look(param: Any, *, _stock: Callable[[Any], object] = stock) -> object:
        return param.get_full_hp_grad() if "_hp_grad" in param.__dict__ else _stock(param)

    safe_get_full_grad.__code__, safe_get_full_grad.__kwdefaults__ = look.__code__, look.__kwdefaults__

    def undo() -> None:
        safe_get_full_grad.__code__, safe_get_full_grad.__kwdefaults__ = code, defaults

    patches.install(patches.FULL_GRADIENT, undo)


def _intercept_gradient(param: Any, hooks: Any) -> None:
    attributes = vars(param)
    if hasattr(param, "ds_id"):
        attributes[_GET] = lambda: hooks.full_gradient(
            param, lambda: param._z3_optimizer.get_fp32_grad_for_param(param)
        )
    else:
        if missing := _STAGE_1_2 - attributes.keys():
            raise contract.changed("access to shards", f"parameters lack {', '.join(sorted(missing))}")
        attributes["_zerosync_stock"] = stock = {name: attributes[name] for name in _STAGE_1_2}

        def set_gradient(value: torch.Tensor) -> None:
            zero3.require_numel(value, param.shape)
            hooks.set_full_gradient(param, value)

        def set_value(value: torch.Tensor, optim_state_key: str | None = None) -> None:
            zero3.require_numel(value, param.shape)
            hooks.set_full_master(param, value, optim_state_key)
            if optim_state_key is None:
                with torch.no_grad():
                    param.copy_(value.view_as(param))  # a step starts from the present parameters

        attributes[_GET] = lambda: hooks.full_gradient(param, stock[_GET])
        attributes[_SET] = set_gradient
        attributes[_GET_VALUE] = lambda optim_state_key=None: hooks.full_master(param, optim_state_key)
        attributes[_SET_VALUE] = set_value
    attributes[_MARK] = True


def release_gradients(params: Iterable[nn.Parameter]) -> None:
    """Undo :func:`intercept_gradients`."""
    for param in params:
        attributes = vars(param)
        del attributes[_MARK], attributes[_GET]
        attributes.update(attributes.pop("_zerosync_stock", {}))
