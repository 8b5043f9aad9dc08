"""ZeRO-3: a parameter that is read where no hook has gathered it is unsharded for its reader (rule E1).

A parameter read outside its module (``F.linear(x, self.other.weight)``) is an empty tensor to a compiler; or it is in
flight; or it happens to be gathered and is resharded before the backward. Here, each read gets a tensor of its own:

==================================  ====================================================================
reader                              what it gets
==================================  ====================================================================
a running unit, its own parameter   the parameter
a forward or backward, eagerly      the parameter, if it is unsharded and stays so; else a copy or gathered
                                    values; a unit's forward that reads it again soon reuses them
a trace                             the read in its graph, as one opaque operator; nothing is gathered
guards, and other readers           the parameter as it is; nothing is gathered
==================================  ====================================================================

The tensor lives as long as something refers to it: the unit's forward that read it, and autograd nodes that saved it.
No other reader shares it, because all ranks must gather alike, but Python's garbage collection differs between ranks.

In graphs, a placeholder stands for a parameter (``values.py``), so that no guard fails when the parameter is gathered
or resharded. The hooks themselves are not compiled: each is a graph break.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zerosync_strategy.core.engine import compilation, zero3
from zerosync_strategy.core.engine.parameter import is_at_rest, is_in_use
from zerosync_strategy.core.engine.types import DeepSpeedEngine, Zero3Parameter
from zerosync_strategy.core.params.intercepted import Alias, Entry, UnshardedParameter, unsharded
from zerosync_strategy.core.params.values import ParameterValues, of_placeholder

_PLACEHOLDERS = "_zerosync_placeholders"  # in a module's __dict__: placeholders by parameter name


class UnshardOnRead:
    """Lets the modules of a ZeRO-3 engine read parameters that no hook has gathered."""

    def __init__(self, engine: DeepSpeedEngine, values: ParameterValues) -> None:
        self._values = values
        self._handles: list[RemovableHandle] = []
        self._modules: dict[nn.Module, tuple[str, ...]] = {}  # with the names of parameters that have properties
        for module in engine.module.modules():
            if not vars(module)["_parameters"] or _PLACEHOLDERS in vars(module):  # handled by another engine
                continue
            names = [name for name, param in module._parameters.items() if _is_sharded(param)]
            vars(module)[_PLACEHOLDERS] = _Placeholders.fromkeys(names)
            self._modules[module] = tuple(name for name in names if not hasattr(type(module), name))
            stock: Any = type(module)
            module.__class__ = _readable(stock, self._modules[module], _gathered)
            self._handles.append(module.register_state_dict_post_hook(_make_entries))
            compilation.make_passive(module)
        self._make_placeholders()

    def detach(self) -> None:
        """Give the modules their classes back."""
        for module in self._modules:
            module.__class__ = type(module).__bases__[0]
            compilation.undo_passive(module)
            del vars(module)[_PLACEHOLDERS]
        for handle in self._handles:
            handle.remove()

    def prepare_deepcompile(self) -> None:
        """Read only for eager frames: DeepCompile removes the hooks and gathers what its graphs read."""
        self._values.leave()
        for module, names in self._modules.items():
            stock: Any = type(module).__bases__[0]
            module.__class__ = _readable(stock, names, _as_it_is)

    def forward_begins(self) -> None:
        """Make new placeholders if other parameters need a gradient than before."""
        with zero3.as_it_is():
            if [param.requires_grad for param, _ in self._given] != self._trained:
                self._make_placeholders()

    def _make_placeholders(self) -> None:
        self._given: list[tuple[nn.Parameter, torch.Tensor]] = []  # the placeholders of modules
        for module in self._modules:
            placeholders = vars(module)[_PLACEHOLDERS]
            for name in [name for name in placeholders if name in module._parameters]:
                param: Any = module._parameters[name]
                placeholders[name] = self._values.placeholder(param)
                self._given.append((param, placeholders[name]))
        self._trained = [placeholder.requires_grad for _, placeholder in self._given]


# ---- placeholders ------------------------------------------------------------------------------------------------


class _Placeholders(dict[str, Any]):
    """Placeholders by name of the parameter. A copy of the module has ordinary parameters and needs none."""

    def __deepcopy__(self, memo: object) -> _Placeholders:
        return _Placeholders()


def _is_sharded(param: Zero3Parameter) -> bool:
    return zero3.is_sharded(param) and zero3.full_numel(param) > 0


# ---- modules that can be read ------------------------------------------------------------------------------------


_Traced = Callable[[Any, str], torch.Tensor]  # (module, name of a parameter) -> what a trace reads


@functools.cache
def _readable(stock: type, names: tuple[str, ...], traced: _Traced) -> type:
    """Return ``stock`` with a property for each parameter in ``names``; cached, so that modules share compiled code."""
    attributes: dict[str, Any] = {name: _property(name, traced) for name in names}
    attributes |= {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    return type(stock.__name__, (stock,), attributes)


def _make_entries(module: nn.Module, entries: dict[str, object], prefix: str, _: object) -> None:
    """Make each entry that ``state_dict()`` has found in ``module`` an :class:`Entry`, which one rank may copy."""
    for name in module._parameters:
        if type(entry := entries.get(f"{prefix}{name}")) is Alias:
            entry.__class__ = Entry


def _gathered(module: Any, name: str) -> torch.Tensor:
    return torch.ops.zerosync.unshard(module._zerosync_placeholders[name])


def _as_it_is(module: Any, name: str) -> torch.Tensor:
    return module._parameters[name]  # DeepCompile gathers it


def _property(name: str, traced: _Traced) -> property:
    """A module's attribute for a parameter. Pruning and the like replace the parameter by another attribute."""

    def replace(module: nn.Module, value: object) -> None:
        vars(module)[_PLACEHOLDERS].pop(name, None)
        vars(module)[name] = value

    def delete(module: nn.Module) -> None:
        _replacement(module, name)
        del vars(module)[name]

    return property(_reader(name, traced), replace, delete)


def _replacement(module: nn.Module, name: str) -> object:
    if name not in module.__dict__:
        raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
    return module.__dict__[name]


def _reader(name: str, traced: _Traced) -> Callable[[nn.Module], object]:
    from torch._dynamo.eval_frame import skip_code

    read_eagerly = torch.compiler.disable(_read_eagerly)

    def read(module: Any) -> object:
        # A trace must not see a parameter that its module's hooks do not keep unsharded: it may be resharded,
        # and its gradient, a full one, would not have its shape.
        if (
            module._zerosync_running
            and name in module._zerosync_placeholders
            and name in module._parameters  # it is registered anew by what removes a parametrization
            and type(param := module._parameters[name])
            is nn.Parameter  # else its values are gone, or it has a subclass
        ):
            return param
        if not torch.compiler.is_compiling():
            param = module._parameters.get(name)
            if param is None and name not in module._parameters:
                return _replacement(module, name)
            return param if is_in_use(param) and not is_at_rest(param) else read_eagerly(module, name, param)
        if name not in module._zerosync_placeholders:
            return module._parameters[name] if name in module._parameters else _replacement(module, name)
        return traced(module, name)

    for function in (read, is_in_use, is_at_rest, zero3.is_gathered):
        skip_code(function.__code__)  # traced only as part of the reader
    return read


def _read_eagerly(module: nn.Module, name: str, param: Zero3Parameter) -> torch.Tensor:
    placeholder = vars(module)[_PLACEHOLDERS].get(name)
    if placeholder is None or not (values := of_placeholder(placeholder)[0]).is_asked:
        return param
    gathered = values.read(param)
    if gathered.in_place:
        return param
    return unsharded(values.differentiable(param, gathered.full), gathered, UnshardedParameter)


# ---- the operator ------------------------------------------------------------------------------------------------


def _unshard(placeholder: torch.Tensor) -> torch.Tensor:
    values, param = of_placeholder(placeholder)
    values.expect_gradient(param)
    return values.scheduler.unshard(param)


torch.library.define("zerosync::unshard", "(Tensor placeholder) -> Tensor")
torch.library.impl("zerosync::unshard", "default", _unshard)
torch.library.register_fake("zerosync::unshard", lambda placeholder: placeholder.new_empty(placeholder.shape))
torch.library.register_autograd("zerosync::unshard", lambda ctx, grad: grad)
