"""The type of a collective in flight: waited for once, whoever uses its result."""

import pytest
import torch

from zerosync_strategy.core.comm.collectives import InFlight, tree_sum


class Work:
    """A work of a process group that counts who waits for it; ``fails`` times first."""

    def __init__(self, fails: int = 0) -> None:
        self.waits = 0
        self.fails = fails

    def wait(self) -> None:
        self.waits += 1
        if self.waits <= self.fails:
            raise RuntimeError("connection lost")

    def is_completed(self) -> bool:
        return self.waits > self.fails


def test_it_is_waited_for_once_and_its_result_goes_through_whoever_uses_it() -> None:
    work, finished = Work(), []
    flight = InFlight([work], lambda: finished.append(1) or torch.ones(2), alive=object())
    flight.then(lambda result: result * 3)
    assert not flight.is_done and not flight.is_over
    assert flight.wait().tolist() == flight.wait(handle_dependency=False).tolist() == [3.0, 3.0]
    assert (work.waits, finished) == (1, [1])
    assert flight.is_done and flight.is_over


def test_what_failed_is_not_taken_for_complete_and_fails_again() -> None:
    """A clean-up that waits for everything shows the error that it cleans up after, not one of its own."""
    work, finished = Work(), []

    def finish() -> None:
        finished.append(1)
        raise RuntimeError(f"failed after it had arrived, {len(finished)}")

    for flight in (InFlight([Work(fails=1)], lambda: "there"), InFlight([work], finish)):
        with pytest.raises(RuntimeError) as first:
            flight.wait()
        assert not flight.is_done
        with pytest.raises(RuntimeError) as again:
            flight.wait()
        assert again.value is first.value and not flight.is_done
    assert (work.waits, finished) == (1, [1])


@pytest.mark.parametrize("count", range(1, 10))
def test_a_sum_in_an_order_takes_one_copy_in_fp32(count: int) -> None:
    rows = torch.randint(-8, 8, (count, 5)).bfloat16()
    before, wide = rows.clone(), rows.float()
    total = tree_sum(rows)
    assert total.dtype is torch.float32 and torch.equal(total, before.float().sum(0)) and torch.equal(rows, before)
    in_place = tree_sum(wide)  # none, if they are in fp32 already
    assert torch.equal(in_place, total)
    assert in_place.untyped_storage().nbytes() == 5 * 4  # the result keeps no memory of the others
