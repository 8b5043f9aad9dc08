"""What profiles show of a step: each phase of ZeroSync, with the bucket or the module that it is about."""

import pytest
import torch
from torch import nn

from tests.harness.engines import make_engine, rank
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", [2, 3])
def test_phases_carry_names(stage: int) -> None:
    def run() -> set[str]:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        zero = {"stage3_param_persistence_threshold": 0}
        engine = make_engine(model, torch.optim.AdamW(model.parameters()), stage, zero)
        attach(engine, coalesce=False)
        with torch.profiler.profile() as profile:
            engine.backward(engine(torch.ones(1, 8) * rank()).sum())
            engine.step()
        return {event.name for event in profile.events() or () if event.name.startswith("zerosync::")}

    for names in run_ranks(run):
        assert {"zerosync::reduce", "zerosync::step"} <= names
        assert {
            f"zerosync::{phase}(0.weight to 1.bias)" for phase in ("reduce_scatter", "wait_reduce_scatter")
        } <= names
        assert stage == 2 or "zerosync::gather('0.weight')" in names
