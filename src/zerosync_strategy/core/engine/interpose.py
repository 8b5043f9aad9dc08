"""Overriding methods of a live object: its class becomes a subclass with our methods first, and can be put back.

A class, unlike an attribute on the instance, is also found by code that looks methods up through the type, as
Lightning's optimizer wrapper does; and restoring it leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Stock: Any = object
"""The base of a class of overrides: its ``super()`` comes to the methods of whatever object it is interposed on."""
_PREFIX = "ZeroSync"


def interpose(target: Any, layer: type, also: tuple[type, ...] = ()) -> None:
    """Put the methods of ``layer`` before those of ``target``; they reach the others through ``super()``.

    The new class is named after the stock class and ZeroSync, as ``ZeroSyncDeepSpeedEngine``. It is a subclass of
    ``also``, too, whose methods come after those of ``target``.
    """
    stock = type(target)
    name = f"{_PREFIX}{stock.__name__.removeprefix(_PREFIX)}"
    # With the layer as a base, objects would be laid out otherwise than those of a class whose first base has no
    # __dict__, as abc.ABC, and Python would refuse.
    kind = type(stock)
    metaclass = kind if issubclass(kind, _Layered) else type("_Layered", (_Layered, kind), {})
    members = {"__module__": layer.__module__, "__doc__": stock.__doc__, "__slots__": (), "_zerosync_layer": layer}
    object.__setattr__(target, "__class__", metaclass(name, (stock, *also), members))


class _Layered(type):
    """Of classes in whose order of methods a layer, which is no base, comes before the bases."""

    def mro(cls) -> list[type]:
        stock = super().mro()
        layer = vars(cls).get("_zerosync_layer")  # a subclass has it in its bases' order
        return stock if layer is None else [cls, *(each for each in layer.__mro__ if each not in stock), *stock[1:]]


@contextmanager
def replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    """While active, ``target`` has another ``value`` of its attribute ``name``; it need not be an own one."""
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
    """Undo :func:`interpose` of ``layer``; a ``RuntimeError`` where that is not the last one on ``target``."""
    outermost = vars(type(target)).get("_zerosync_layer")
    if outermost is not layer:
        raise RuntimeError(
            f"restore() was asked to take {layer.__name__} off a {type(target).__name__}, whose outermost layer is"
            f" {getattr(outermost, '__name__', None)}. Take layers off in the reverse order of interpose()."
        )
    object.__setattr__(target, "__class__", type(target).__bases__[0])


class ModeOverrides(Stock):
    """Overrides of ``DeepSpeedEngine``: its mode is its module's. DeepSpeed's own says training for ever."""

    module: torch.nn.Module

    @property
    def training(self) -> bool:
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.module.training = mode

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        return self  # as every other module; DeepSpeed returns nothing

    def eval(self) -> Any:
        super().eval()
        return self
