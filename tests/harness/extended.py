"""Which cases `make test` leaves out and `make test-all` runs: the further members of products, and what reaches no
line or branch that the others do not (`python -m trials.cover` finds it), unless it alone finds a mutant.

The mark ``extended`` is on a test, on one of its parameters, or on a test with ``but``, which says what of it runs
nevertheless:

- ``but=VALUES``: as few cases as have every value of every parameter once;
- ``but=("1-2", ...)``: the cases with these ids.

A test that is named by its node id runs with all its cases, unless ``--extended`` is ``none``; with ``all``, everything
does. With ``--share K/N``, the K-th of N parts of the extended cases runs, too.
"""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

import pytest

VALUES = "every value"
STAGES = (pytest.param(1, marks=pytest.mark.extended), 2, 3)
"""ZeRO's stages, for what cannot differ between stages 1 and 2."""


def left_out(
    items: Iterable[pytest.Item], arguments: Iterable[str], which: Literal["none", "named", "all"], share: str | None
) -> set[pytest.Item]:
    """Return those of ``items`` that a call of pytest with ``arguments`` and these two options does not run."""
    named = {argument.partition("::")[2] for argument in arguments if "::" in argument} if which == "named" else set()
    return {
        item
        for item in (() if which == "all" else extended_of(items))
        if named.isdisjoint((name := item.nodeid.partition("::")[2], name.partition("[")[0]))
        and not (share and in_share(item.nodeid, share))
    }


def extended_of(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the extended ones of ``items``."""
    found: set[pytest.Item] = set()
    products: dict[str, list[Any]] = {}
    for item in items:
        marks = list(item.iter_markers("extended"))
        but: list[str | Collection[str]] = [mark.kwargs["but"] for mark in marks if mark.kwargs]
        function, _, case = item.nodeid.partition("[")
        if len(but) < len(marks):
            found.add(item)
        elif but and but[0] == VALUES:
            products.setdefault(function, []).append(item)
        elif but and case.removesuffix("]") not in but[0]:
            found.add(item)
    for cases in products.values():
        kept = covering([{(name, id(value)) for name, value in case.callspec.params.items()} for case in cases])
        found |= {case for number, case in enumerate(cases) if number not in kept}
    return found


def unknown_ids(items: Iterable[pytest.Item]) -> set[str]:
    """Return the node ids that a mark has in ``but``, and that none of ``items`` has."""
    there, asked = set(), set()
    for item in items:
        there.add(item.nodeid)
        for mark in item.iter_markers("extended"):
            but = mark.kwargs.get("but", ())
            asked |= {f"{item.nodeid.partition('[')[0]}[{case}]" for case in (() if but == VALUES else but)}
    return asked - there


def covering(cases: Sequence[Collection[Any]]) -> set[int]:
    """Return the numbers of few ``cases`` that have every value that one of them has."""
    lacking, kept = set().union(*cases), set()
    while lacking:
        best = max(range(len(cases)), key=lambda number: len(lacking.intersection(cases[number])))
        kept.add(best)
        lacking.difference_update(cases[best])
    return kept


def in_share(node_id: str, share: str) -> bool:
    """Whether a case is in the share ``K/N``. Each is in one of the N, the same one on every machine."""
    part, parts = map(int, share.split("/"))
    return int(hashlib.sha256(node_id.encode()).hexdigest(), 16) % parts == part - 1
