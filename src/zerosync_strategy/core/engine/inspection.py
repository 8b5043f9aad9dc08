"""What tools ask of an engine: the contract's verdict on each feature, and what it keeps in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zerosync_strategy.core.engine import contract, zero, zero3, zero3_optimizer
from zerosync_strategy.core.engine.contract import ContractError, Internal
from zerosync_strategy.core.engine.supported import internals_of

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
    of_stage = (
        (*contract.UNSHARD_ON_READ, *contract.SEVERAL_ENGINES, *contract.NESTED_ZERO_INIT, *contract.EVALUATION)
        if engine.zero_optimization_stage() == 3
        else ()
    )
    of_all = (*contract.CONFIGURATION, *contract.ACCUMULATION, *contract.ANY_MODEL, *contract.UNIVERSAL)
    table = (*of_all, *internals_of(engine), *of_stage, *contract.DEEPCOMPILE)
    found: dict[str, Verdict] = {}
    for internal in table:
        if internal.feature not in found or not found[internal.feature].problem:
            found[internal.feature] = _verdict(internal, engine)
    return found


def _verdict(internal: Internal, engine: Any) -> Verdict:
    if internal in _NEEDED and not contract.has(internal):
        return Verdict(f"needs DeepSpeed {internal.since} or newer, the first with {internal.name!r}", True)
    try:
        contract.require((internal,), engine)
    except ContractError as problem:
        return Verdict(str(problem))
    return Verdict()


def resident(engine: Any) -> Mapping[str, list[torch.Tensor]]:
    """Return what an engine keeps from one optimizer step to the next, by kind.

    Returns:
        ``"optimizer"``: master weights, and the states of the optimizer. ``"parameters"``: the module's, sharded or
        whole, and its buffers. ``"gradients"``: the shards in which ZeRO-3 keeps gradients. In fp32, master weights may
        be parameters, too.
    """
    module, optimizer = engine.module, engine.optimizer
    if zero.stage(engine) == 3:
        own = [param.ds_tensor for param in module.parameters() if zero3.is_sharded(param)]
        masters = optimizer.fp32_partitioned_groups_flat
        gradients = list(zero3_optimizer.gradient_shards(optimizer).values())
    else:
        own, masters, gradients = [], optimizer.single_partition_of_fp32_groups, []
    stepping = zero.stepping_optimizer(engine)
    states = (value for state in stepping.state.values() for value in state.values())
    stepped = (param.data for group in stepping.param_groups for param in group["params"])  # whole ones on ZeRO-3
    return {
        "optimizer": [*(master.data for master in masters), *stepped, *filter(torch.is_tensor, states)],
        "parameters": [*(param.data for param in module.parameters()), *module.buffers(), *own],
        "gradients": gradients,
    }
