"""The code for changes of 16-bit numbers gives every bit back."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from zerosync_strategy.core.comm import differences
from zerosync_strategy.core.comm.differences import BITS, Plan, choose_plan, count, decode, digest, encode

ALL = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
SPECIAL = [0, 0x8000, 1, 0x8001, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0xFFFF, 0x7FFF, 0x3F80, 0x7C00, 0xFC00]


@pytest.fixture(params=["host", "device"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The host's indices, and the prefix sums that a device takes, on the same tensors; in pieces that are small."""
    monkeypatch.setattr(differences, "_HOST_PIECE", 4096)
    if request.param == "device":
        for cls in (differences._Escaped, differences._Returned):
            monkeypatch.setattr(cls, "_is_on_host", staticmethod(lambda device: False))
    return str(request.param)


def plans(numel: int, rooms: int) -> Iterator[Plan]:
    """Every way to chain the levels, with room for so many numbers above the first."""
    for size in range(1, 5):
        for chosen in itertools.combinations(BITS, size):
            levels = zip((*chosen, 16), [-(-numel // 64) * 64, *[rooms] * size], strict=True)
            yield Plan(numel, tuple(levels))


def there_and_back(new: torch.Tensor, old: torch.Tensor, plan: Plan) -> torch.Tensor:
    coded = torch.full((1, plan.nbytes), 0x5A, dtype=torch.uint8)
    encode(new, old, plan, coded[0])
    rows = old.clone().view(1, -1)
    decode(coded, rows, plan)
    return rows[0]


def test_every_difference_in_every_code(way: str) -> None:
    """Of all 2**32 pairs, code and decoder see the difference alone: new less old modulo 2**16, which is added back.

    So these 2**16 pairs, one of each difference, stand for all, if subtraction and addition undo each other, which the
    next test asks of values of every exponent and sign.
    """
    old = torch.zeros_like(ALL)
    for plan in plans(len(ALL), len(ALL)):
        assert torch.equal(there_and_back(ALL, old, plan), ALL), plan


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_from_special_ones_and_to_them(way: str, dtype: torch.dtype) -> None:
    """Zeros of both signs, infinities, NaNs with payloads: all 65,536 patterns, each way."""
    plan = choose_plan(len(ALL), [len(ALL)] * 4)
    for special in SPECIAL:
        there = torch.full_like(ALL, special - 2**16 if special >= 2**15 else special).view(dtype)
        everything = ALL.view(dtype)
        assert torch.equal(there_and_back(everything, there, plan).view(torch.int16), ALL)
        assert torch.equal(there_and_back(there, everything, plan).view(torch.int16), there.view(torch.int16))


def test_a_step_of_one_unit_has_a_code_of_two_bits() -> None:
    """Whatever the exponent: also from a power of two to what is below it, and from a zero to the smallest number."""
    value = torch.tensor([1.0, 1.0, -1.0, 2.0**-100, 0.0], dtype=torch.bfloat16)
    towards = torch.tensor([2.0, 0.0, -9.0, 1.0, 9.0], dtype=torch.bfloat16)
    assert count(torch.nextafter(value, towards), value).tolist() == [5, 0, 0, 0]


@pytest.mark.parametrize("numel", [1, 8, 13, 64, 4095, 4097, 10_000])
@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_of_any_size(way: str, numel: int, ranks: int) -> None:
    draw = torch.Generator().manual_seed(numel)
    for spread in (0.0, 0.6, 4.0, 60.0, 1e5):
        old = ALL[torch.randint(2**16, (ranks, numel), generator=draw)].view(torch.bfloat16)
        moved = (torch.randn(ranks, numel, generator=draw) * spread).int()
        new = (old.view(torch.int16).int() + moved).to(torch.int16).view(torch.bfloat16)
        counted = torch.stack([count(*pair) for pair in zip(new, old, strict=True)])
        half = {bits: 2 ** (bits - 1) - 1 for bits in BITS}
        wrapped = (moved + 2**15) % 2**16 - 2**15
        assert counted.tolist() == [[int((row.abs() > half[bits]).sum()) for bits in BITS] for row in wrapped]
        plan = choose_plan(numel, counted.amax(0).tolist())
        coded = torch.empty(ranks, plan.nbytes, dtype=torch.uint8)
        for row, of_row in enumerate(coded):
            encode(new[row], old[row], plan, of_row)
        decode(coded, old, plan)
        assert torch.equal(old.view(torch.int16), new.view(torch.int16))


def test_what_does_not_hold_changes_nothing(way: str) -> None:
    """Whatever its bytes are."""
    draw = torch.Generator().manual_seed(0)
    plan = Plan(1000, ((2, 1024), (4, 128), (16, 64)))
    rows = torch.randint(-(2**15), 2**15, (3, 1000), generator=draw).to(torch.int16)
    before = rows.clone()
    decode(torch.randint(256, (3, plan.nbytes), generator=draw).to(torch.uint8), rows, plan, torch.tensor(False))
    assert torch.equal(rows, before)


def test_the_smallest_plan() -> None:
    """Of few changes, one bit each; of many large ones, sixteen for all that do not fit in eight."""
    assert choose_plan(64_000, [640, 64, 64, 64]).levels == ((1, 64_000), (2, 640), (16, 64))
    assert choose_plan(64_000, [64_000, 60_000, 50_000, 1_000]).levels[0][0] == 8
    assert all(choose_plan(64_000, [n] * 4).nbytes <= 64_000 * 2 * 1.07 for n in (0, 100, 64_000))


def test_a_digest_sees_what_is_elsewhere() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(-(2**15), 2**15, (2, 300_001), generator=draw).to(torch.int16)
    first = digest(rows)
    for change in ((0, 1), (3, 4), (299_999, 5), (300_000, 77_777)):
        swapped = rows.clone()
        swapped[0, change[0]], swapped[0, change[1]] = rows[0, change[1]], rows[0, change[0]]
        assert (digest(swapped) == first).tolist() == [torch.equal(swapped[0], rows[0]), True]
    assert digest(rows[:, :0]).tolist() == [0, 0]
