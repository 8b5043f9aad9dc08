"""Overriding methods of a live object: its class becomes a subclass with our methods first, and can be put back.

A class, unlike an attribute on the instance, is also found by code that looks methods up through the type, as
Lightning's optimizer wrapper does; and restoring it leaves no trace.
"""

from __future__ import annotations

from typing import Any

_PREFIX = "ZeroSync"


def interpose(target: Any, layer: type, also: tuple[type, ...] = ()) -> None:
    """Put the methods of ``layer`` before those of ``target``; they reach the others through ``super()``.

    The new class is named after the stock class and ZeroSync, as ``ZeroSyncDeepSpeedEngine``.

    Args:
        also: classes that ``target`` is to be an instance of; their methods come after those of ``target``.
    """
    stock = type(target)
    name = f"{_PREFIX}{stock.__name__.removeprefix(_PREFIX)}"
    target.__class__ = type(name, (layer, stock, *also), {"__module__": layer.__module__, "__doc__": stock.__doc__})


def restore(target: Any, layer: type) -> None:
    """Undo :func:`interpose` of ``layer``.

    Raises:
        RuntimeError: ``layer`` is not the last that was interposed on ``target``.
    """
    bases = type(target).__bases__
    if bases[0] is not layer:
        raise RuntimeError(
            f"restore() was asked to take {layer.__name__} off a {type(target).__name__}, whose outermost layer is"
            f" {bases[0].__name__}. Take layers off in the reverse order of interpose()."
        )
    target.__class__ = bases[1]
