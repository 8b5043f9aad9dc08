"""Which cases `make test-all` alone runs.

The mark ``extended`` is on what `make test` leaves out: on a test, on one of its parameters, or on a test with ``but``,
which says what of it `make test` does run:

- ``but=VALUES``: as few cases as have every value of every parameter once;
- ``but=PAIRS``: as few as have every pair of values of two parameters;
- ``but=("1-2", ...)``: the cases with these ids.

With ``--all``, every case runs; with ``--share K/N``, also the K-th of N parts of those left out. A test that its
node id names runs, extended or not.
"""

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

VALUES, PAIRS = 1, 2
STAGES = (pytest.param(1, marks=pytest.mark.extended), 2, 3)
"""ZeRO's stages, for what cannot differ between stages 1 and 2."""


def extended_of(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return those of ``items`` that `make test` leaves out."""
    found: set[pytest.Item] = set()
    of_products: dict[tuple[str, int], list[Any]] = {}
    for item in items:
        marks = list(item.iter_markers("extended"))
        but = [mark.kwargs["but"] for mark in marks if mark.kwargs]
        if len(but) < len(marks):
            found.add(item)
        elif but and isinstance(but[0], int):
            of_products.setdefault((item.nodeid.partition("[")[0], but[0]), []).append(item)
        elif but and item.nodeid.partition("[")[2].removesuffix("]") not in but[0]:
            found.add(item)
    for (_, size), cases in of_products.items():
        kept = covering([{name: id(value) for name, value in case.callspec.params.items()} for case in cases], size)
        found |= {case for number, case in enumerate(cases) if number not in kept}
    return found


def covering(cases: Sequence[Mapping[str, int]], size: int) -> set[int]:
    """Return numbers of ``cases`` that have all combinations of the values of ``size`` parameters, few of them."""
    has = [set(itertools.combinations(sorted(case.items()), min(size, len(case)))) for case in cases]
    lacking, kept = set().union(*has), set()
    while lacking:
        best = max(range(len(cases)), key=lambda number: len(has[number] & lacking))
        kept.add(best)
        lacking -= has[best]
    return kept


def in_share(node_id: str, share: str) -> bool:
    """Whether a case is in the share ``K/N``: each is in one of the N, on every machine in the same one."""
    part, parts = map(int, share.split("/"))
    return int(hashlib.sha256(node_id.encode()).hexdigest(), 16) % parts == part - 1
