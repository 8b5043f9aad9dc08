"""What `make test` leaves out, and that no share leaves out anything for good."""

import itertools
from typing import Any, Literal

import pytest

from tests.harness.extended import STAGES, VALUES, covering, extended_of, in_share, left_out, unknown_ids

FILE = "tests/test_some.py"


class Item:
    """As much of pytest's as is asked."""

    def __init__(self, name: str, *marks: pytest.MarkDecorator, **params: Any) -> None:
        self.nodeid, self.callspec, self.params, self._marks = f"{FILE}::{name}", self, params, marks

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [decorator.mark for decorator in self._marks if decorator.name == name]


def names(items: Any) -> list[str]:
    return sorted(item.nodeid.partition("::")[2] for item in items)


def test_what_is_extended() -> None:
    extended, but = pytest.mark.extended, pytest.mark.extended(but=("1", "2-b"))
    items: list[Any] = [
        Item("test_a", extended), Item("test_b"), Item("test_d", pytest.mark.slow),
        Item("test_c[1]", but), Item("test_c[2-b]", but), Item("test_c[2]", but), Item("test_c[1]", but, extended),
    ]  # fmt: skip
    assert names(extended_of(items)) == ["test_a", "test_c[1]", "test_c[2]"]
    assert unknown_ids(items) == set()
    assert unknown_ids(items[4:5]) == {f"{FILE}::test_c[1]"}
    assert [bool(getattr(stage, "marks", ())) for stage in STAGES] == [True, False, False]


def test_few_cases_of_a_product_have_every_value() -> None:
    mark = pytest.mark.extended(but=VALUES)
    items: list[Any] = [
        Item(f"test_it[{one}-{two}-{three}]", mark, one=one, two=two, three=three)
        for one, two, three in itertools.product((1, 2, 3), "ab", (True, False))
    ]
    kept = [item.params for item in items if item not in extended_of(items)]
    assert len(kept) == 3
    assert [{params[name] for params in kept} for name in ("one", "two", "three")] == [
        {1, 2, 3},
        {"a", "b"},
        {True, False},
    ]
    assert covering([{1}, {1, 2}, {3}]) == {1, 2}


@pytest.mark.parametrize(
    ("which", "argument", "expected"),
    [
        ("named", FILE, ["test_it[1]", "test_it[2]"]),
        ("named", f"{FILE}::test_it[2]", ["test_it[1]"]),
        ("named", f"{FILE}::test_it", []),
        ("named", f"{FILE}::test_i", ["test_it[1]", "test_it[2]"]),
        ("none", f"{FILE}::test_it", ["test_it[1]", "test_it[2]"]),
        ("all", FILE, []),
    ],
)
def test_what_is_named_runs(which: Literal["none", "named", "all"], argument: str, expected: list[str]) -> None:
    items: list[Any] = [Item(f"test_it[{case}]", pytest.mark.extended) for case in (1, 2)]
    assert names(left_out(items, [argument, "tests/test_other.py"], which, None)) == expected


def test_each_case_is_in_one_share() -> None:
    items: list[Any] = [Item(f"test_it[{case}]", pytest.mark.extended) for case in range(70)]
    parts = [set(names(items)) - set(names(left_out(items, [FILE], "named", f"{k}/7"))) for k in range(1, 8)]
    assert sorted(itertools.chain(*parts)) == names(items)
    assert all(2 < len(part) < 20 for part in parts)
    assert in_share("tests/test_some.py::test_it", "3/7")  # on every machine, on every day
