"""What a printed report calls its engine, where a process has several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any


def label_of(engine: Any, attached: Iterable[Any]) -> str:
    """Return the class of the module of ``engine``, one of those ``attached``; empty where it is the only one.

    Of several over one module, the attributes that hold what it trains; where names are the same, with a number.
    """
    engines = sorted(attached, key=lambda each: each.number)
    if len(engines) < 2:
        return ""
    labels = [_label(each, engines) for each in engines]
    own = labels[engines.index(engine)]
    if Counter(labels)[own] == 1:
        return own
    return f"{own} {1 + [each for each, label in zip(engines, labels, strict=True) if label == own].index(engine)}"


def _label(engine: Any, engines: Iterable[Any]) -> str:
    if all(each is engine or each.parts.names.keys().isdisjoint(engine.parts.names) for each in engines):
        return type(engine.parts.engine.module).__name__
    return ", ".join(
        dict.fromkeys(engine.parts.names[param].partition(".")[0] for param in engine.parts.reducer.params)
    )
