"""Whole parameters in programs as users write them: Muon with AdamW in one optimizer, in fp32 and in 16 bits."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param

from tests.core.test_fp16 import BACKWARDS, DYNAMIC, STATIC, device, scaled_loss
from tests.harness.copying import loss_of, network
from tests.harness.engines import configuration, make_engine, rank, start
from tests.harness.masters import Masters
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

SCALE_POWER, STEPS = 13, 4
SMALL = {"reduce_bucket_size": 300, "stage3_param_persistence_threshold": 0}


def both(params: Iterable[Any]) -> Any:
    """The optimizer of the example: Muon for matrices, AdamW for the rest."""
    from muon import MuonWithAdamW

    params = list(params)
    return MuonWithAdamW([each for each in params if each.dim() == 2], [each for each in params if each.dim() < 2])


@pytest.mark.extended
@pytest.mark.parametrize(
    ("stage", "dtype", "options", "scale", "clip", "overflows"),
    [
        (1, torch.float16, {}, STATIC, 1.0, True),
        (2, torch.float16, {"coalesce": False}, DYNAMIC, 0.0, True),
        (2, torch.bfloat16, {"grad_memory_budget": 300}, {}, 1.0, False),
        (3, torch.float16, {}, DYNAMIC, 1.0, True),
        (3, torch.bfloat16, {"param_memory_budget": "all"}, {}, 0.0, False),
    ],
)
def test_training_in_16_bits(
    stage: int, dtype: torch.dtype, options: Any, scale: Any, clip: float, overflows: bool
) -> None:
    """A parameter has moved as in plain torch, but for a tenth; a step more or less would be a quarter."""

    def run() -> tuple[float, int]:
        with device():
            oracle = Masters(network(), dtype, both, scale=2**SCALE_POWER, clip=clip)
            start, net = {name: value.clone() for name, value in oracle.parameters().items()}, network()
            enabled = {"fp16": {"enabled": True, **scale}} if dtype == torch.float16 else {"bf16": {"enabled": True}}
            engine = make_engine(net, both(net.parameters()), stage, SMALL, gradient_clipping=clip, **enabled)
            attach(engine, **options)
            loss = lambda module, k, r: scaled_loss(module, k, r, overflows) / BACKWARDS  # noqa: E731
            for step in range(STEPS):
                ks = range(BACKWARDS * step, BACKWARDS * (step + 1))
                for k in ks:
                    engine.backward(loss(engine, k, rank()))
                engine.step()
                oracle.step(loss, ks)
            params = dict(net.named_parameters())
            off = [
                float((safe_get_full_fp32_param(params[name]) - right).norm() / (right - start[name]).norm())
                for name, right in oracle.parameters().items()
            ]
            return max(off), engine.skipped_steps

    for off, skipped in run_ranks(run):
        assert off < 0.1 and skipped == overflows


@pytest.mark.extended
@pytest.mark.parametrize("stage", [2, 3])
def test_muon_with_adamw_in_one_optimizer(stage: int, tmp_path: Path) -> None:
    """The optimizer of the example, made under ``zero.Init`` on stage 3, saved and loaded."""

    def run() -> tuple[float, float]:
        start()
        plain = network()
        oracle = Oracle(plain, both(plain.parameters()))

        def built() -> Any:
            with deepspeed.zero.Init(enabled=stage == 3, config_dict_or_path=configuration(stage)):
                net = network()
            with deepspeed.zero.GatheredParameters(list(net.parameters()), enabled=stage == 3):
                optimizer = both(net.parameters())
            engine = make_engine(net, optimizer, stage, SMALL)
            attach(engine)
            return engine

        def steps(engine: Any, ks: range) -> None:
            for k in ks:
                engine.backward(loss_of(engine, k, rank()))
                engine.step()

        engine = built()
        steps(engine, range(3))
        for k in range(3):
            oracle.backward(lambda r, k=k: loss_of(plain, k, r))
            oracle.step()
        off = distance(full_parameters(engine.module), full_parameters(plain))
        engine.save_checkpoint(str(tmp_path))
        steps(engine, range(3, 5))
        resumed = built()
        steps(resumed, range(7, 8))
        resumed.load_checkpoint(str(tmp_path))
        steps(resumed, range(3, 5))
        return off, distance(full_parameters(engine.module), full_parameters(resumed.module))

    assert run_ranks(run) == [(0.0, 0.0)] * 2
