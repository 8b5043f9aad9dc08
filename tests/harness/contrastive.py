"""A contrastive problem whose backward runs further backwards inside itself: gradient caching, in two ways."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from torch import nn
from transformers import BertConfig, BertModel

from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.problem import WORLD

BATCH, MINI_BATCH, TOKENS, VOCABULARY = 6, 2, 8, 32


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=TOKENS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, features: dict[str, torch.Tensor], **_: Any) -> dict[str, torch.Tensor]:
        hidden = self.bert(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
        features["sentence_embedding"] = hidden.last_hidden_state.mean(1)
        return features


def encoder() -> SentenceTransformer:
    """A small model with random parameters, the same every time."""
    return SentenceTransformer(modules=[_Encoder()], device="cpu")


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def pairs(step: int, rank: int) -> list[dict[str, torch.Tensor]]:
    """Anchors and positives of one rank's batch."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    return [
        {"input_ids": torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator), "attention_mask": mask}
        for _ in range(2)
    ]


def plain_loss(model: SentenceTransformer, features: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Without caching: all embeddings in one graph."""
    return MultipleNegativesRankingLoss(model)(features, None)


def hook_loss(model: SentenceTransformer, features: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Of sentence-transformers: a leaf, in whose hook one backward runs for each mini-batch."""
    return CachedMultipleNegativesRankingLoss(model, mini_batch_size=MINI_BATCH)(features, None)


class _CachedEmbeddings(torch.autograd.Function):
    """Embeddings without their graph; backward embeds again and runs a backward for each mini-batch."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, embed: Callable[..., torch.Tensor], *mini_batches: Any) -> torch.Tensor:
        ctx.embed, ctx.mini_batches = embed, mini_batches
        with torch.no_grad():
            return torch.cat([embed(mini_batch) for mini_batch in mini_batches])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        for mini_batch, part in zip(ctx.mini_batches, gradient.split(MINI_BATCH), strict=True):
            with torch.enable_grad():
                ctx.embed(mini_batch).backward(part)
        return (None,) * (2 + len(ctx.mini_batches))


def function_loss(model: SentenceTransformer, features: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """As in GradCache: a function whose backward runs one backward for each mini-batch."""

    def embed(mini_batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(dict(mini_batch))["sentence_embedding"]

    def mini_batches(column: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        parts = {name: values.split(MINI_BATCH) for name, values in column.items()}
        return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]

    trigger = torch.ones((), requires_grad=True)
    anchors, positives = (_CachedEmbeddings.apply(trigger, embed, *mini_batches(column)) for column in features)
    scores = 20 * nn.functional.normalize(anchors) @ nn.functional.normalize(positives).T
    return nn.functional.cross_entropy(scores, torch.arange(BATCH))


@functools.cache
def plain_training(steps: int) -> dict[str, torch.Tensor]:
    """The parameters after that many steps of plain torch without caching, one batch per rank and step."""
    model = encoder()
    before = full_parameters(model)
    oracle = Oracle(model, optimizer(model), WORLD)
    oracle.train(lambda model, step, rank: plain_loss(model, pairs(step, rank)), steps)
    after = full_parameters(model)
    assert distance(after, before) > 0.02  # training does move them
    return after
