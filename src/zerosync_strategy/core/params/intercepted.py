"""ZeRO-3: a sharded parameter acts as its full values, wherever a program reads or writes it (N1).

To torch, a sharded parameter is an empty tensor, and what is written to it would be lost. So while a parameter is *at
rest*, it has a class of its own that intercepts each operation on it:

===================================  ==================================================================================
what a program does                  what happens
===================================  ==================================================================================
asks for a shape                     it gets the full shape
asks for a gradient, a device, ...   DeepSpeed's sharded parameter answers
differentiates by it                 also by what it has read of it; gradients of all uses add up at the parameter
reads (``p.norm()``, ``p * 2``)      the values are gathered for this operation; gradients go to the parameter
gives it to ``torch.func``           the transform gets the values, as a reader
writes (``p.mul_(2)``, ``init``)     the values are gathered, changed, and written back to this rank's shard
``p.data``, ``p.detach()``           an :class:`Alias`, which acts in the same way; once it requires a gradient of its
                                     own, it is an :class:`Unsharded` leaf
takes a view (``p.data[0]``)         an :class:`Unsharded` tensor with the present values; writes are written back
``module.state_dict()``              an :class:`Entry` for each parameter, which one rank alone may copy and save
===================================  ==================================================================================

A parameter is at rest unless a running module uses it, a user's context has gathered it, or DeepSpeed keeps it gathered
permanently. Gathers are collective: a program reads and writes alike on all ranks, as in plain data parallelism.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor as is_transformed
from torch.utils._pytree import tree_leaves, tree_map

from zerosync_strategy.core.engine import compilation, patches, zero3
from zerosync_strategy.core.engine.parameter import Record, record_of
from zerosync_strategy.core.engine.types import Zero3Parameter
from zerosync_strategy.core.failures import misused_gradients
from zerosync_strategy.core.params.state_entries import (
    CONVERSIONS,
    GET_DATA,
    OF_A_LEAF,
    OF_THE_OBJECT,
    OF_THE_SHAPE,
    REQUIRE_GRADIENT,
    SET_DATA,
    Copied,
    StateEntry,
)  # fmt: skip
from zerosync_strategy.core.params.values import REMEDY, GatheredValues, ParameterValues


class _Intercepted:
    """A tensor whose operations this file intercepts."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func in OF_THE_OBJECT or (func in OF_THE_SHAPE and issubclass(cls, Unsharded)):
            with zero3.as_it_is():
                found = func(*args, **(kwargs or {}))
            is_missing = found is None and func == misused_gradients.GET_GRAD
            return cls._reduced_gradient(args[0]) if is_missing else found
        if func in (torch.autograd.grad, torch.autograd.backward):
            return _differentiate(func, args, kwargs or {})
        return _operate(func, args, kwargs or {})

    @staticmethod
    def _reduced_gradient(tensor: Any) -> torch.Tensor | None:
        """Return what stands for the gradient of ``tensor`` that is not on it."""
        return None


class _Sharded(_Intercepted):
    """An intercepted tensor without the values."""

    def __reduce_ex__(self: Any, protocol: object) -> str | tuple[Any, ...]:
        raise RuntimeError(
            f"Parameter {record_of(_param_of(self)).name} was to be saved while ZeRO-3 has it sharded. Save a"
            f" checkpoint through the engine, or zerosync.full_state(). Or: {REMEDY}"
        )


class _AtRest(_Sharded):
    """A parameter at rest."""

    zerosync_shows_reduced_gradients = True

    @staticmethod
    def _reduced_gradient(tensor: Any) -> torch.Tensor | None:
        changes = record_of(tensor).changes
        is_gone = changes is not None and changes.gone and tensor.requires_grad
        return misused_gradients.stand_in(tensor) if is_gone else None

    def __repr__(self: Any) -> str:
        return f"Parameter sharded by ZeRO-3, shape={zero3.full_shape(self)}, requires_grad={self.requires_grad}"

    def __deepcopy__(self: Any, memo: dict[int, object]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = type(self).__bases__[1](self.data.clone(), self.requires_grad)
        return memo[id(self)]


class Alias(_Sharded, torch.Tensor):
    """Another tensor for a sharded parameter: ``p.data`` and ``p.detach()``, without its gradient; ``p.view_as(p)``."""

    zerosync_param: Zero3Parameter

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if cls is Alias and func in REQUIRE_GRADIENT and _is_given_gradients(*args, **(kwargs or {})):
            _take_values(args[0])
        return super().__torch_function__(func, types, args, kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"values of: {self.zerosync_param!r}"

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        return self.clone()

    def __reduce_ex__(self, protocol: object) -> str | tuple[Any, ...]:
        param = self.zerosync_param
        if not zero3.is_gathered(param):
            return super().__reduce_ex__(protocol)
        record = record_of(param)
        record.owner.join((record,))  # as after an evaluation, until the next forward
        with zero3.as_it_is():
            saved = param.data.clone() if len(record.units) == 1 else param.data  # alone, without its unit's storage
            return saved.__reduce_ex__(protocol)


class Entry(StateEntry, Alias):
    """The entry of a ``state_dict()`` for a sharded parameter."""

    def __reduce_ex__(self, protocol: object) -> str | tuple[Any, ...]:
        is_gathered = zero3.is_gathered(self.zerosync_param)
        return (Alias if is_gathered else StateEntry).__reduce_ex__(self, protocol)

    @classmethod
    def _compute(cls, func: Any, types: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        entry = args[0] if args else None
        if func is torch.Tensor.view and isinstance(entry, Entry) and entry.zerosync_shows_bytes:
            param = entry.zerosync_param
            if zero3.is_gathered(param):  # transformers looks for tied tensors by where their last elements lie
                record_of(param).owner.join((record_of(param),))
                with zero3.as_it_is():
                    return func(*args, **kwargs)
        return _operate(func, args, kwargs)

    def zerosync_shard(self) -> torch.Tensor | None:
        shard: torch.Tensor | None = record_of(self.zerosync_param).owner.shard(self.zerosync_param)
        return shard


class Unsharded(_Intercepted, torch.Tensor):
    """Values of a parameter that was read where no hook had gathered it, or a view of them."""

    zerosync_values: GatheredValues

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        return self.as_subclass(torch.Tensor).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: object) -> str | tuple[Any, ...]:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> object:
        # Attributes by which programs find out whether they have to gather a parameter.
        return zero3.answer_of_gathered(name, self.zerosync_values.param)


class UnshardedParameter(Unsharded):
    """The whole values, which a program takes for the parameter: questions about a leaf go to the parameter."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in OF_A_LEAF:
            return super().__torch_function__(func, types, args, kwargs)
        param = args[0].zerosync_values.param
        if func == SET_DATA:
            return _set_data(param, args[1])
        with zero3.as_it_is():
            result = func(param, *args[1:], **(kwargs or {}))
        return args[0] if result is param else result

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        if id(self) not in memo:
            memo[id(self)] = torch.nn.Parameter(self.zerosync_values.full.clone(), self.requires_grad)
        return memo[id(self)]


for _class in (Alias, Entry, Unsharded, UnshardedParameter):
    compilation.leave_to_eager_code(_class)


def unsharded(tensor: torch.Tensor, gathered: GatheredValues, as_a: type[Unsharded] = Unsharded) -> Unsharded:
    """Return ``tensor``, which lies in ``gathered``, as a tensor whose changes are written back."""
    tensor.__class__ = as_a
    tensor.zerosync_values = gathered  # type: ignore[attr-defined]
    return tensor  # type: ignore[return-value]


@functools.cache
def class_at_rest(stock: type) -> type:
    """Return the class of parameters at rest whose own class is ``stock``."""
    attributes = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    found = type(stock.__name__, (_AtRest, stock), attributes)
    compilation.leave_to_eager_code(found)
    return found


def _param_of(tensor: Any) -> Zero3Parameter:
    return tensor.zerosync_param if isinstance(tensor, Alias) else tensor


def _values_of(tensor: Any) -> ParameterValues:
    return record_of(_param_of(tensor)).values


def _differentiate(func: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
    """Run a function that looks up tensors in a graph, with their own classes: what was read is the parameter there."""
    args, kwargs = tree_map(
        lambda each: each.zerosync_values.param if type(each) is UnshardedParameter else each, (args, kwargs)
    )
    given = {id(each): each for each in tree_leaves((args, kwargs)) if isinstance(each, _Intercepted)}
    classes: list[tuple[Any, type]] = [(each, type(each)) for each in given.values()]
    for each, cls in classes:
        each.__class__ = record_of(each).own_class if issubclass(cls, _AtRest) else torch.Tensor
    try:
        return func(*args, **kwargs)
    finally:
        for each, cls in classes:
            each.__class__ = cls
            if issubclass(cls, _AtRest):
                record_of(each).settle()


# ---- operations --------------------------------------------------------------------------------------------------


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def _operate(func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    if args and isinstance(args[0], _Sharded):
        if func in _OF_SHARDED and (done := _OF_SHARDED[func](*args)) is not NotImplemented:
            return done
        if func in OF_THE_SHAPE:
            return func(zero3.without_values(param := _param_of(args[0]), param.dtype), *args[1:], **kwargs)
        if getattr(func, "__name__", "") in CONVERSIONS:
            with zero3.as_it_is():
                if func(*args, **kwargs) is args[0]:
                    return args[0]  # already of that dtype and on that device
    operation = _Operation()
    args, kwargs = tree_map(operation.operand, (args, kwargs))
    try:
        result = func(*args, **kwargs)
    finally:
        operation.settle()
    operation.write_back()
    return tree_map(operation.result, result)


class _Operation:
    """One operation: its operands with values in place of parameters, and what has to be written back."""

    def __init__(self) -> None:
        self._operands: dict[int, tuple[Any, torch.Tensor, GatheredValues, int]] = {}
        self._gathered: dict[Any, GatheredValues] = {}
        self._used: list[Record] = []  # parameters that are operands themselves

    def operand(self, given: object) -> Any:
        """Return what to compute with in place of ``given``."""
        if isinstance(given, Copied):
            given.zerosync_gather()
        if not isinstance(given, _Intercepted):
            return given
        if id(given) not in self._operands:
            plain, gathered = self._unsharded(given) if isinstance(given, Unsharded) else self._gather(given)
            self._operands[id(given)] = given, plain, gathered, plain._version
        return self._operands[id(given)][1]

    def _unsharded(self, given: Unsharded) -> tuple[torch.Tensor, GatheredValues]:
        gathered = given.zerosync_values
        gathered.check()
        plain = given.as_subclass(torch.Tensor)
        if isinstance(given, UnshardedParameter) and not plain.requires_grad:
            # Read under no_grad, but perhaps used with gradients.
            return gathered.for_use(), gathered
        return plain, gathered

    def _gather(self, given: Any) -> tuple[torch.Tensor, GatheredValues]:
        param, values = _param_of(given), _values_of(given)
        if param not in self._gathered:
            self._gathered[param] = values.read(param)
        gathered = self._gathered[param]
        if gathered.in_place and given is param:
            self._used.append(record_of(param))
            self._used[-1].use()
            return given, gathered
        values.expect_gradient(param)  # perhaps it is computed here, inside of an autograd.Function
        return gathered.for_use() if given.requires_grad else gathered.full, gathered

    def settle(self) -> None:
        for record in self._used:
            record.settle()

    def write_back(self) -> None:
        for _, plain, gathered, version in self._operands.values():
            if plain._version != version:
                gathered.write_back()

    def result(self, computed: object) -> object:
        """Return what the program gets for ``computed``."""
        if type(computed) is not torch.Tensor or computed.layout is not torch.strided or is_transformed(computed):
            return computed
        for given, plain, gathered, _ in self._operands.values():
            if computed is plain:
                return given
            if _lies_in(computed, gathered.full):
                return unsharded(computed, gathered)
        return computed


def _lies_in(view: torch.Tensor, full: torch.Tensor) -> bool:
    """Return whether ``view`` begins in the memory of ``full``, whose storage may have other parameters, too."""
    if view.untyped_storage()._cdata != full.untyped_storage()._cdata:
        return False
    begin, of_view = (each.storage_offset() * each.element_size() for each in (full, view))
    return begin <= of_view < begin + max(full.nbytes, 1)


def read_in_transforms() -> None:
    """Make transforms of torch.func take the values of sharded parameters; they look at no class that intercepts."""
    patches.wrap(patches.DIFFERENTIATED, _transform)
    patches.wrap(patches.BATCHED, _transform)


def _transform(stock: Callable[..., object], given: object, *args: object) -> object:
    if not isinstance(given, _Intercepted):
        return stock(given, *args)
    operation = _Operation()
    try:
        return stock(operation.operand(given), *args)
    finally:
        operation.settle()


def _alias(tensor: torch.Tensor, alias: torch.Tensor) -> torch.Tensor:
    alias.__class__ = Alias
    alias.zerosync_param = _param_of(tensor)  # type: ignore[attr-defined]
    return alias


def _is_given_gradients(alias: torch.Tensor, requires_grad: bool = True) -> bool:
    return requires_grad and not alias.requires_grad


def _take_values(alias: torch.Tensor) -> None:
    """Make ``alias`` an :class:`Unsharded` tensor, to be differentiated by."""
    values, param = _values_of(alias), _param_of(alias)
    gathered = values.read(param)
    values.expect_gradient(param)
    with zero3.as_it_is():
        alias.data = gathered.full
    unsharded(alias, gathered)


def _detach(tensor: torch.Tensor) -> torch.Tensor:
    with zero3.as_it_is():
        return _alias(tensor, tensor.detach())


def _view_as(tensor: torch.Tensor, other: torch.Tensor) -> object:
    if other is not tensor:
        return NotImplemented
    with zero3.as_it_is():  # this is how torch.autograd.graph looks up the parameter's node
        return _alias(tensor, tensor.view_as(tensor))


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if not isinstance(value, _Sharded) or _param_of(value) is not _param_of(tensor):
        _values_of(tensor).assign(_param_of(tensor), _Operation().operand(value))


_OF_SHARDED: dict[Any, Callable[..., Any]] = {
    GET_DATA: _detach,
    SET_DATA: _set_data,
    torch.Tensor.detach: _detach,
    torch.detach: _detach,
    torch.Tensor.view_as: _view_as,
}
