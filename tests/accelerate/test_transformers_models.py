"""Models of transformers that are built or read under ZeRO-3's context, and checkpoint their activations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from tests.harness.engines import configuration, make_engine, rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import ZeroSyncPlugin, attach

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=8, tie_word_embeddings=True, attn_implementation="sdpa",
)  # fmt: skip
STEPS, BACKWARDS = 3, 2
LAYER_BYTES = 4 * 8 * (4 * 8 + 3 * 16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """In place of the Hub: a model whose parameters no constructor gives."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) / 10)
    model.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def loss_of(model: Any, k: int, rank: int) -> torch.Tensor:
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(10 * k + rank))
    return model(input_ids=tokens, labels=tokens).loss


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


def plain_torch(start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model = LlamaForCausalLM(CONFIG)
    model.load_state_dict(start, strict=False)  # the tied head has no name of its own there
    oracle = Oracle(model, sgd(model))
    for k in range(STEPS * BACKWARDS):
        oracle.backward(lambda rank, k=k: loss_of(model, k, rank))
        if (k + 1) % BACKWARDS == 0:
            oracle.step()
    return full_parameters(model)


def assert_as_plain_torch(ranks: list[Any], start: dict[str, torch.Tensor] | None = None) -> None:
    """``ranks`` has the parameters before and after training."""
    ((first, _), *_) = ranks
    (expected,) = run_ranks(plain_torch, start or first, world_size=1)
    for before, after in ranks:
        assert distance(before, start or first) == 0.0
        assert distance(after, expected) < 1e-6
    assert distance(first, expected) > 0.01


def saved(folder: Path) -> dict[str, torch.Tensor]:
    return full_parameters(LlamaForCausalLM.from_pretrained(folder))


BUILD = {
    "from_config": lambda folder: AutoModelForCausalLM.from_config(CONFIG),
    "from_pretrained": AutoModelForCausalLM.from_pretrained,
}


@pytest.mark.parametrize("build", BUILD)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero3_init_flag(stage: int, build: str, folder: Path) -> None:
    """``zero3_init_flag: true`` of the launch configuration: under ZeRO-3 the model is never whole on a rank."""

    def train() -> Any:
        accelerator = Accelerator(deepspeed_plugin=ZeroSyncPlugin())
        torch.manual_seed(3)
        net = BUILD[build](folder)
        assert all(hasattr(param, "ds_id") for param in net.parameters()) is (stage == 3)
        model, optimizer = accelerator.prepare(net, sgd(net))
        before = full_parameters(net)
        for k in range(STEPS * BACKWARDS):
            accelerator.backward(loss_of(model, k, rank()))
            if (k + 1) % BACKWARDS == 0:
                optimizer.step()
                optimizer.zero_grad()
        return before, full_parameters(net)

    env = {
        "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
    }  # fmt: skip
    ranks = run_ranks(train, env=env)
    assert_as_plain_torch(ranks, saved(folder) if build == "from_pretrained" else None)


BUDGETS = [(None, 0), (LAYER_BYTES, 0), (0, 0)]
BUDGETS_OF_STAGE_3 = [(None, "all"), (LAYER_BYTES, LAYER_BYTES), (0, 0)]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_plain_deepspeed_with_activation_checkpointing(stage: int, reentrant: bool, folder: Path) -> None:
    """Read under ZeRO-3's context, which transformers' ``HfDeepSpeedConfig`` makes, and with the memory budgets."""

    def train(unreduced: Any, gathered: Any) -> Any:
        context = HfDeepSpeedConfig(configuration(stage))
        net = AutoModelForCausalLM.from_pretrained(folder)
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

    for unreduced, gathered in BUDGETS_OF_STAGE_3 if stage == 3 else BUDGETS:
        assert_as_plain_torch(run_ranks(train, unreduced, gathered), saved(folder))
