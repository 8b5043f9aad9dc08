"""A tiny causal language model of transformers in a folder, as from the Hub, and its training by plain torch."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.harness.oracle import Oracle, full_parameters

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=8, tie_word_embeddings=True, attn_implementation="sdpa",
)  # fmt: skip
STEPS, BACKWARDS = 3, 2
LAYER_BYTES = 4 * 8 * (4 * 8 + 3 * 16)


def save(folder: Path) -> dict[str, torch.Tensor]:
    """Write a model whose parameters no constructor gives, and return them."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) / 10)
    model.save_pretrained(folder)
    return full_parameters(model)


def loss_of(model: Any, k: int, rank: int) -> torch.Tensor:
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(10 * k + rank))
    return model(input_ids=tokens, labels=tokens).loss


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


def plain_torch(start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model = LlamaForCausalLM(CONFIG)
    model.load_state_dict(start, strict=False)  # the tied head has no name of its own there
    return Oracle(model, sgd(model)).train(loss_of, STEPS, BACKWARDS)
