"""Ulysses sequence parallelism by Accelerate's parallelism configuration: two replicas of two ranks each, exact."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import ParallelismConfig
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from tests.harness.oracle import NORM, Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from tests.harness.releases import since
from zerosync_strategy import ZeroSyncPlugin

WORLD, SHARDS = 4, 2
LENGTH, VOCABULARY = 8, 32
STEPS, BACKWARDS, CLIP = 2, 2, 0.5


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


class Gather(torch.autograd.Function):
    """``torch.distributed.nn.functional.all_gather`` as it is on NCCL; on gloo its backward fails on a subgroup."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, values = group, [torch.empty_like(value) for _ in range(SHARDS)]
        dist.all_gather(values, value.contiguous(), group=group)
        return torch.stack(values)

    @staticmethod
    def backward(ctx: Any, grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        dist.all_reduce(grads, group=ctx.group)
        return grads[dist.get_rank(ctx.group)], None


def sequence_loss(model: Any, batch: Any, group: Any) -> torch.Tensor:
    """The mean over the tokens of the whole sequence, on each of its ranks: as in Accelerate's guide."""
    logits, labels = model(**batch).logits, batch["shift_labels"]
    loss = model.module.loss_function(logits=logits, labels=None, shift_labels=labels, vocab_size=VOCABULARY)
    tokens = Gather.apply((labels != -100).sum(), group)
    return (Gather.apply(loss, group) * tokens).sum() / tokens.sum()


def train(stage: int) -> Any:
    from accelerate.utils.dataclasses import DeepSpeedSequenceParallelConfig
    from deepspeed.utils import groups

    parallelism = ParallelismConfig(
        sp_backend="deepspeed", sp_size=SHARDS, dp_shard_size=WORLD // SHARDS,
        sp_handler=DeepSpeedSequenceParallelConfig(
            sp_seq_length=LENGTH, sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
        ),
    )  # fmt: skip
    accelerator = Accelerator(deepspeed_plugin=ZeroSyncPlugin(stage=stage), parallelism_config=parallelism)
    tokens = torch.randint(
        0, VOCABULARY, (WORLD * BACKWARDS * STEPS, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    rows = [{"input_ids": row, "position_ids": torch.arange(LENGTH), "labels": row} for row in tokens]
    net = llama()
    model, optimizer, loader = accelerator.prepare(net, sgd(net), DataLoader(rows, batch_size=1))
    parts, norms = [], []
    for index, batch in zip(range(STEPS * BACKWARDS), loader, strict=False):
        parts.append(batch["input_ids"].clone())
        accelerator.backward(sequence_loss(model, batch, groups._get_sequence_parallel_group()))
        if (index + 1) % BACKWARDS == 0:
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()
    return parts, norms, full_parameters(net)


@pytest.mark.extended
@since("1.12", "it has no sequence parallelism", package="accelerate")
@since("0.19.8", "its loader of parts of sequences does not run on gloo")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_replicas_of_two_ranks(stage: int) -> None:
    """Stock's gradients are twice as large on stages 1 and 2: they are divided by the replicas, not by the ranks."""
    ranks = run_ranks(train, stage, world_size=WORLD)

    def plain_torch() -> Any:
        net = llama()
        oracle, norms = Oracle(net, sgd(net), WORLD // SHARDS), []
        for index in range(STEPS * BACKWARDS):
            for replica in range(WORLD // SHARDS):
                parts = [ranks[replica * SHARDS + shard][0][index] for shard in range(SHARDS)]
                tokens = torch.cat(parts, dim=1)
                oracle.backward_on(replica, net(input_ids=tokens, labels=tokens).loss)
            if (index + 1) % BACKWARDS == 0:
                norms.append(oracle.step(CLIP))
        return norms, full_parameters(net)

    ((expected_norms, expected),) = run_ranks(plain_torch, world_size=1)
    assert min(expected_norms) > CLIP
    for _, norms, parameters in ranks:
        assert norms == pytest.approx(expected_norms, rel=NORM)
        assert distance(parameters, expected) == 0.0
