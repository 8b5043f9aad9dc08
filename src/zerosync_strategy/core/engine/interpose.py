"""Overrides methods of a live object: its class becomes a subclass with our methods first, which can be undone.

Unlike an attribute of the instance, a class also works for code that looks up methods on the type, such as Lightning's
optimizer wrapper. Restoring it leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Stock: Any = object
"""The base of a class of overrides: ``super()`` refers to the object on which it is interposed."""
_PREFIX = "ZeroSync"


def interpose(target: Any, layer: type, also: tuple[type, ...] = ()) -> None:
    """Put the methods of ``layer`` before those of ``target``, which they call through ``super()``.

    The new class is named after the stock class and ZeroSync, as ``ZeroSyncDeepSpeedEngine``. It also inherits from
    ``also``, whose methods come after those of ``target``.
    """
    stock = type(target)
    name = f"{_PREFIX}{stock.__name__.removeprefix(_PREFIX)}"
    # With the layer as a base, the object layout would differ if the first base of the class has no
    # __dict__, such as abc.ABC, and Python would refuse the assignment.
    kind = type(stock)
    metaclass = kind if issubclass(kind, _Layered) else type("_Layered", (_Layered, kind), {})
    members = {"__module__": layer.__module__, "__doc__": stock.__doc__, "__slots__": (), "_zerosync_layer": layer}
    object.__setattr__(target, "__class__", metaclass(name, (stock, *also), members))


class _Layered(type):
    """The metaclass of classes whose method resolution order has a layer, which is no base, before the bases."""

    def mro(cls) -> list[type]:
        stock = super().mro()
        layer = vars(cls).get("_zerosync_layer")  # a subclass inherits it from its bases' order
        return stock if layer is None else [cls, *(each for each in layer.__mro__ if each not in stock), *stock[1:]]


@contextmanager
def replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    """While active, the attribute ``name`` of ``target``, its own or inherited, is ``value``."""
    before, is_own = getattr(target, name), name in getattr(target, "__dict__", ())
    setattr(target, name, value)
    try:
        yield
    finally:
        if not is_own and name in getattr(target, "__dict__", ()):
            delattr(target, name)  # its class has it
        else:
            setattr(target, name, before)


def restore(target: Any, layer: type) -> None:
    """Undo :func:`interpose` of ``layer``; raise ``RuntimeError`` if it is not the outermost layer of ``target``."""
    outermost = vars(type(target)).get("_zerosync_layer")
    if outermost is not layer:
        raise RuntimeError(
            f"restore() was asked to take {layer.__name__} off a {type(target).__name__}, whose outermost layer is"
            f" {getattr(outermost, '__name__', None)}. Take layers off in the reverse order of interpose()."
        )
    object.__setattr__(target, "__class__", type(target).__bases__[0])


class ModeOverrides(Stock):
    """Overrides of ``DeepSpeedEngine``: its ``training`` mode is that of its module. DeepSpeed's own is always true."""

    module: torch.nn.Module

    @property
    def training(self) -> bool:
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.module.training = mode

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        return self  # as torch's modules do; DeepSpeed returns nothing

    def eval(self) -> Any:
        super().eval()
        return self
