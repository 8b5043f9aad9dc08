"""The contract's verdict on a live engine by feature, for who asks before training (C1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zerosync_strategy.core.engine import contract
from zerosync_strategy.core.engine.internals import ContractError, Internal

# Without these a feature is an error where it is used; without any other that a release lacks, ZeroSync does otherwise.
_NEEDED = (contract.COMPILE_BACKEND, contract.PARAM_GROUP, contract.STEPPED_OFFLOADED)


@dataclass(frozen=True)
class Verdict:
    """What the contract says of one feature.

    Attributes:
        problem: what is wrong, in a sentence; empty where all internals are as ZeroSync knows them.
        needs_newer: a newer DeepSpeed has the feature; everything else works without.
    """

    problem: str = ""
    needs_newer: bool = False


def verdicts(engine: Any) -> dict[str, Verdict]:
    """Return what is wrong with each feature on ``engine``, which ZeroSync is not attached to.

    Args:
        engine: DeepSpeed's, of stage 1, 2 or 3. Features of an offloaded optimizer are looked at where it has one.

    Returns:
        By feature, the first problem.
    """
    found: dict[str, Verdict] = {}
    for internal in _tables(engine):
        if internal.feature not in found or not found[internal.feature].problem:
            found[internal.feature] = _verdict(internal, engine)
    return found


def _tables(engine: Any) -> tuple[Internal, ...]:
    of_stage = (
        (*contract.UNSHARD_ON_READ, *contract.SEVERAL_ENGINES, *contract.NESTED_ZERO_INIT, *contract.EVALUATION,
         *contract.RACE_CHECK_STAGE_3)
        if engine.zero_optimization_stage() == 3
        else contract.RACE_CHECK_STAGE_1_2
    )  # fmt: skip
    of_all = (*contract.CONFIGURATION, *contract.ACCUMULATION, *contract.SCALARS, *contract.UNIVERSAL)
    return (*of_all, *contract.internals_of(engine), *of_stage, *contract.DEEPCOMPILE, *contract.RACE_CHECK)


def _verdict(internal: Internal, engine: Any) -> Verdict:
    if internal in _NEEDED and not contract.has(internal):
        return Verdict(f"needs DeepSpeed {internal.since} or newer, the first with {internal.name!r}", True)
    try:
        contract.require((internal,), engine)
    except ContractError as problem:
        return Verdict(str(problem))
    return Verdict()
