"""Models of transformers that are built or read under ZeRO-3's context, and checkpoint their activations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from tests.harness.engines import configuration, make_engine, rank, start
from tests.harness.extended import STAGES
from tests.harness.llama import BACKWARDS, CONFIG, LAYER_BYTES, STEPS, loss_of, plain_torch, save, sgd
from tests.harness.oracle import distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import ZeroSyncPlugin, attach


def assert_as_plain_torch(ranks: list[Any], start: dict[str, torch.Tensor] | None = None) -> None:
    """``ranks`` has the parameters before and after training."""
    ((first, _), *_) = ranks
    (expected,) = run_ranks(plain_torch, start or first, world_size=1)
    for before, after in ranks:
        assert distance(before, start or first) == 0.0  # to the bit: read, gathered and copied
        assert distance(after, expected) == 0.0
    assert distance(first, expected) > 0.01


BUILD = {
    "from_config": lambda folder: AutoModelForCausalLM.from_config(CONFIG),
    "from_pretrained": AutoModelForCausalLM.from_pretrained,
}


@pytest.mark.extended(but=("3-from_pretrained",))
@pytest.mark.parametrize("build", BUILD)
@pytest.mark.parametrize("stage", STAGES)
def test_zero3_init_flag(stage: int, build: str, tmp_path: Path) -> None:
    """``zero3_init_flag: true`` of the launch configuration: under ZeRO-3 the model is never whole on a rank."""

    def train() -> Any:
        accelerator = Accelerator(deepspeed_plugin=ZeroSyncPlugin())
        torch.manual_seed(3)
        net = BUILD[build](tmp_path)
        assert all(hasattr(param, "ds_id") for param in net.parameters()) is (stage == 3)
        model, optimizer = accelerator.prepare(net, sgd(net))
        before = full_parameters(net)
        for k in range(STEPS * BACKWARDS):
            accelerator.backward(loss_of(model, k, rank()))
            if (k + 1) % BACKWARDS == 0:
                optimizer.step()
                optimizer.zero_grad()
        return before, full_parameters(net)

    saved = save(tmp_path)
    env = {
        "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
    }  # fmt: skip
    ranks = run_ranks(train, env=env)
    assert_as_plain_torch(ranks, saved if build == "from_pretrained" else None)


BUDGETS = [(None, 0), (LAYER_BYTES, 0), (0, 0)]
BUDGETS_OF_STAGE_3 = [(None, "all"), (LAYER_BYTES, LAYER_BYTES), (0, 0)]


@pytest.mark.extended
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_plain_deepspeed_with_activation_checkpointing(stage: int, reentrant: bool, tmp_path: Path) -> None:
    """Read under ZeRO-3's context, which transformers' ``HfDeepSpeedConfig`` makes, and with the memory budgets."""

    def train(unreduced: Any, gathered: Any) -> Any:
        start()  # before the context does, which would compile an operator
        context = HfDeepSpeedConfig(configuration(stage))
        net = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert all(hasattr(param, "ds_id") for param in net.parameters()) is (stage == 3)
        net.gradient_checkpointing_enable({"use_reentrant": reentrant})
        net.enable_input_require_grads()
        engine = make_engine(net, sgd(net), stage)
        attach(engine, grad_memory_budget=unreduced, param_memory_budget=gathered)
        before = full_parameters(net)
        for k in range(STEPS * BACKWARDS):
            engine.backward(loss_of(engine, k, rank()))
            if (k + 1) % BACKWARDS == 0:
                engine.step()
        del context
        return before, full_parameters(net)

    saved = save(tmp_path)
    for unreduced, gathered in BUDGETS_OF_STAGE_3 if stage == 3 else BUDGETS:
        assert_as_plain_torch(run_ranks(train, unreduced, gathered), saved)
