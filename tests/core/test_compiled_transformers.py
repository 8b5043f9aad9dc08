"""Compiled transformers under ZeRO-3: a mixture of experts and a Llama, equal to uncompiled."""

from typing import Any

import pytest
import torch

from tests.harness.engines import make_engine, rank
from tests.harness.oracle import Oracle, distance, full_parameters, of_trained
from tests.harness.ranks import run_ranks
from tests.harness.rounding import excess
from zerosync_strategy import attach

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2MoeConfig

SMALL = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=32, use_cache=False,
)  # fmt: skip
CONFIGS = {
    "llama": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24
    ),
}


def make(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]())


def loss_of(model: Any, k: int, of_rank: int) -> torch.Tensor:
    words = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(10 * k + of_rank))
    return model(input_ids=words, labels=words).loss


def plain_torch(name: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """This rank's losses, and the parameters."""
    model, losses = make(name), []
    oracle = Oracle(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for k in range(5):
        losses.append(of_trained(model, lambda k=k: loss_of(model, k, rank()).detach()))
        oracle.backward(lambda r, k=k: loss_of(model, k, r))
        oracle.step()
    return losses, full_parameters(model)


def train(name: str, backend: str, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = make(name)
    zero = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    engine = make_engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), zero=zero)
    attach(engine, **options)
    if backend:
        engine.compile(backend=backend)
    losses = []
    for k in range(5):
        loss = loss_of(engine, k, rank())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, full_parameters(model)


@pytest.mark.extended  # test_eager_frames.py has each of its ways to read and to break a graph
@pytest.mark.parametrize("name", ["qwen2_moe", pytest.param("llama", marks=pytest.mark.slow)])
def test_equal_to_plain_torch(name: str) -> None:
    def run() -> tuple[float, float]:
        losses, plain = plain_torch(name)
        ours, compiled = train(name, "aot_eager")
        return max(excess(torch.tensor(a), b) for a, b in zip(ours, losses, strict=True)), distance(compiled, plain)

    assert run_ranks(run, timeout=280) == [(0.0, 0.0)] * 2
