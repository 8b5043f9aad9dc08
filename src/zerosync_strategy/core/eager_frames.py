"""ZeRO-3: a parameter that is read while it is partitioned is unsharded for its reader (rule E1).

ZeRO-3 gathers a module's parameters in hooks around its forward and backward. A parameter read elsewhere
(``F.linear(x, self.other.weight)``), or in a frame whose hooks the compiler has moved, is an empty tensor: an error
under ``torch.compile``, or wrong. Here such a read gives a tensor of its own instead:

=================================  =============================================================================
who reads                          what it gets
=================================  =============================================================================
anyone, the parameter is gathered  the parameter
a forward or backward, eagerly     ``zerosync::unshard(ticket)``, which gathers
a trace                            the same call in its graph, one opaque operator; nothing is gathered
guards, anyone else                the parameter as it is: partitioned; nothing is gathered
=================================  =============================================================================

The tensor is claimed by whatever refers to it: variables of the frame that reads, and autograd nodes that saved it. Its
memory goes with the last of them, also where a backward never runs. Nothing is kept for the next reader, because ranks
must gather alike and Python does not collect its garbage alike.

A *ticket* stands for a parameter in graphs: of its shape, without its memory, and the same for good, so that no guard
fails as parameters come and go. Its gradient is the parameter's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zerosync_strategy.core import contract

_TICKETS = "_zerosync_tickets"  # in a module's __dict__, tickets by parameter name
_owners: dict[int, tuple[EagerFrames, Any]] = {}  # address of a ticket's memory -> its parameter


class EagerFrames:
    """Lets the modules of a ZeRO-3 engine read partitioned parameters.

    Args:
        engine: the engine.

    Attributes:
        bytes: of unsharded parameters alive now.
        peak_bytes: the most of them at once since the last :meth:`end_window`.
    """

    def __init__(self, engine: Any) -> None:
        self.bytes = self.peak_bytes = 0
        self._engine = engine
        contract.unwrap_compiled(engine)
        self._tickets: dict[Any, torch.Tensor] = {}
        self._hooks: list[Any] = []
        self._modules = [module for module in engine.module.modules() if vars(module)["_parameters"]]
        for module in self._modules:
            names = {name: param for name, param in module._parameters.items() if _is_sharded(param)}
            vars(module)[_TICKETS] = _Tickets({name: self._ticket(param) for name, param in names.items()})
            module.__class__ = _readable(type(module), tuple(name for name in names if not hasattr(type(module), name)))
            module._parameters.__class__ = contract.passive_parameters()

    def detach(self) -> None:
        """Give the modules their classes back."""
        for module in self._modules:
            module.__class__ = type(module).__bases__[0]
            module._parameters.__class__ = type(module._parameters).__bases__[0]
            del vars(module)[_TICKETS]
        for hook in self._hooks:
            hook.remove()
        for ticket in self._tickets.values():
            del _owners[ticket.data_ptr()]

    def end_window(self) -> None:
        """Count the peak anew."""
        self.peak_bytes = self.bytes

    def _ticket(self, param: Any) -> torch.Tensor:
        if param not in self._tickets:
            blank = _blank(param)
            if param.requires_grad:
                with _in_shape(param, blank):
                    ticket = _Ticket.apply(param, blank)
                self._hooks.append(param.register_post_accumulate_grad_hook(_lose_shape))
            else:
                ticket = blank
            torch._dynamo.mark_static(ticket)
            self._tickets[param] = ticket
            _owners[ticket.data_ptr()] = (self, param)
        return self._tickets[param]

    def unshard(self, param: Any) -> torch.Tensor:
        """The values of ``param``, in memory that no one else holds. Collective."""
        full = contract.stage_3_gather(self._engine, param)
        self.bytes += (size := full.numel() * full.element_size())
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(full.untyped_storage(), self._freed, size)
        return full

    def _freed(self, size: int) -> None:
        self.bytes -= size


class _Tickets(dict[str, torch.Tensor]):
    """By name of the parameter. A copy of the module has ordinary parameters and needs none."""

    def __deepcopy__(self, memo: Any) -> _Tickets:
        return _Tickets()


def _is_sharded(param: Any) -> bool:
    return hasattr(param, "ds_status") and param.ds_numel > 0


def _blank(param: Any) -> torch.Tensor:
    return torch.empty(1, dtype=param.dtype, device=param.device).expand(param.ds_shape)


class _Ticket(torch.autograd.Function):
    """Leads a gradient to the parameter's own node, where it joins those of other uses."""

    @staticmethod
    def forward(ctx: Any, param: Any, blank: torch.Tensor) -> torch.Tensor:
        ctx.param, ctx.blank = param, blank.detach()
        return blank

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        if ctx.param.numel() == 0:
            ctx.param.data = ctx.blank  # autograd lays the gradient out as the parameter is
        return grad if ctx.param.requires_grad else None, None


@contextmanager
def _in_shape(param: Any, blank: torch.Tensor) -> Iterator[None]:
    """While autograd makes the parameter's node, which accepts gradients of the shape that it sees now."""
    data, param.data = param.data, blank
    try:
        yield
    finally:
        param.data = data


def _lose_shape(param: Any) -> None:
    if param.ds_status.name == "NOT_AVAILABLE" and param.numel() > 0:
        param.data = param.data.new_empty(0)


def _readable(stock: type, names: tuple[str, ...]) -> type:
    """``stock`` with a property for each parameter in ``names``."""
    key = (stock, names)
    if key not in _classes:
        attributes: dict[str, Any] = {name: property(_reader(name)) for name in names}
        attributes |= {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
        _classes[key] = type(stock.__name__, (stock,), attributes)
    return _classes[key]


_classes: dict[tuple[type, tuple[str, ...]], type] = {}  # one for all modules alike, so that they share compiled code


def _reader(name: str) -> Callable[[nn.Module], Any]:
    def read(module: nn.Module) -> Any:
        param = module._parameters.get(name)
        if param is None or param.numel() > 0:
            return param
        if torch.compiler.is_compiling():
            return torch.ops.zerosync.unshard(module._zerosync_tickets[name])
        return _read_eagerly(module, name, param)

    return read


def _read_eagerly(module: Any, name: str, param: Any) -> Any:
    running = module._parameters._in_forward or torch._C._current_graph_task_id() != -1
    return torch.ops.zerosync.unshard(vars(module)[_TICKETS][name]) if running else param


def _unshard(ticket: torch.Tensor) -> torch.Tensor:
    frames, param = _owners[ticket.data_ptr()]
    return frames.unshard(param)


torch.library.define("zerosync::unshard", "(Tensor ticket) -> Tensor")
torch.library.impl("zerosync::unshard", "default", _unshard)
torch.library.register_fake("zerosync::unshard", lambda ticket: ticket.new_empty(ticket.shape))
torch.library.register_autograd("zerosync::unshard", lambda ctx, grad: grad)
