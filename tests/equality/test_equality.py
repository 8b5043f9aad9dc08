"""What counts as a difference between two revisions."""

from tests.equality.__main__ import differences
from tests.equality.recorder import END, ERROR, Row

ROWS: list[Row] = [("1", "backwards", "3"), ("2", "backwards", "3"), (END, "weight", "af")]


def test_every_value_of_every_rank_is_compared() -> None:
    assert list(differences({"p": [ROWS, ROWS]}, {"p": [ROWS, ROWS]})) == []
    changed: list[Row] = [("1", "backwards", "4"), (END, "weight", "af"), (END, "bias", "b0")]
    assert list(differences({"p": [ROWS, ROWS]}, {"p": [ROWS, changed]})) == [
        "p: rank 1, step 1, backwards: 3 before, 4 after",
        "p: rank 1, step 2, backwards: 3 before, - after",
        "p: rank 1, at the end, bias: - before, b0 after",
    ]


def test_a_program_that_fails_in_the_same_way_is_not_equal() -> None:
    failed: list[Row] = [(END, ERROR, "ValueError")]
    assert list(differences({"p": [failed]}, {"p": [failed]})) == [
        "p: rank 0, at the end, error: ValueError before, ValueError after"
    ]
