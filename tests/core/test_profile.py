"""What profiles show of a step: each phase of ZeroSync, with the bucket or the module that it is about."""

import os

import deepspeed
import pytest
import torch
from torch import nn

from tests.harness.ranks import run_ranks
from zerosync_strategy import attach, prepare_cpu


@pytest.mark.parametrize("stage", [2, 3])
def test_phases_carry_names(stage: int) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }

    def run() -> set[str]:
        prepare_cpu()
        deepspeed.init_distributed("gloo")
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        engine, *_ = deepspeed.initialize(model=model, config=config)
        attach(engine, coalesce=False)
        with torch.profiler.profile() as profile:
            engine.backward(engine(torch.ones(1, 8) * int(os.environ["RANK"])).sum())
            engine.step()
        return {event.name for event in profile.events() or () if event.name.startswith("zerosync::")}

    for names in run_ranks(run):
        assert {"zerosync::reduce", "zerosync::step"} <= names
        assert {
            f"zerosync::{phase}(1.bias to 0.weight)" for phase in ("reduce_scatter", "wait_reduce_scatter")
        } <= names
        assert stage == 2 or "zerosync::gather('0.weight')" in names
