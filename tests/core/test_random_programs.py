"""Random programs on stages 1, 2, 3 equal plain torch: exactly when coalesced on two ranks (W1, W2)."""

from collections.abc import Iterable
from typing import Any

import pytest

from tests.harness.engines import rank, start
from tests.harness.extended import STAGES
from tests.harness.oracle import distance, full_parameters
from tests.harness.programs import Program, run_attached
from tests.harness.ranks import run_ranks
from tests.harness.strict import strict
from zerosync_strategy.core.gradients import reducer


def failures(seeds: Iterable[int], stage: int, ranks: int = 2) -> list[str]:
    start()
    wrong = []
    for seed in seeds:
        program = Program(seed, stage, ranks)
        try:
            error = distance(full_parameters(run_attached(program, rank())), full_parameters(program.run_oracle()))
        except Exception as problem:
            problem.add_note(f"in {program}") if hasattr(problem, "add_note") else None
            raise
        if error > 0.0:
            wrong.append(f"{error:.1e} in {program} {program.zero} {program.optimizer} {program.options}")
    return wrong


def some_of(some: Iterable[int], others: Iterable[int]) -> Any:
    """Programs that `make test` runs, and those that `make test-all` runs, too."""
    return pytest.mark.parametrize(
        "seeds", [some, pytest.param(others, marks=pytest.mark.extended)], ids=["some", "others"]
    )


@pytest.mark.extended(but=("some-3",))
@pytest.mark.parametrize("stage", STAGES)
@some_of([*range(6), 2116], range(6, 30))  # in 2116, a gather is in flight when a step begins
def test_random_programs(stage: int, seeds: Iterable[int]) -> None:
    assert run_ranks(failures, seeds, stage, timeout=240) == [[], []]


@pytest.mark.extended
@pytest.mark.parametrize("stage", [1, 2, 3])
@some_of(range(1000, 1003), range(1003, 1008))
def test_random_programs_on_three_ranks(stage: int, seeds: Iterable[int]) -> None:
    assert run_ranks(failures, seeds, stage, 3, world_size=3, timeout=240) == [[], [], []]


@pytest.mark.extended(but=("some-3",))
@pytest.mark.parametrize("stage", STAGES)
@some_of(range(3000, 3003), range(3003, 3012))
def test_random_programs_by_native_collectives(
    stage: int, seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent on NCCL, by its rules: matched by order alone, and there once somebody has waited."""
    monkeypatch.setattr(reducer, "SMALL_BYTES", 100)

    def run() -> list[str]:
        start()
        with strict():
            return failures(seeds, stage)

    assert run_ranks(run, timeout=240) == [[], []]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_many_random_programs(stage: int) -> None:
    assert run_ranks(failures, range(2000, 2400), stage, timeout=2900) == [[], []]
