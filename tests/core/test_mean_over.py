"""Means over tokens: backwards and ranks have different numbers of them, and one rank may have none."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.engines import make_engine, rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from tests.harness.releases import needs_fp16
from zerosync_strategy import attach

TOKENS = [[[3, 5], [1]], [[2], [0, 4, 7]], [[0], [0]], [[6], [0]]]
"""By step and rank, for each backward."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def total_loss(module: Any, step: int, of_rank: int, micro: int, tokens: int) -> torch.Tensor:
    data = torch.Generator().manual_seed(1000 * step + 100 * of_rank + micro)
    x, y = torch.randn(tokens, 6, generator=data), torch.randint(3, (tokens,), generator=data)
    return nn.functional.cross_entropy(module(x), y, reduction="sum")


@pytest.mark.extended(
    but=(
        "1-options0-config0",
        "3-options6-config6",
    )
)
@pytest.mark.parametrize(
    ("stage", "options", "config"),
    [
        (1, {}, {}),
        (2, {}, {"gradient_clipping": 0.2}),
        (2, {"coalesce": False}, {}),
        (2, {}, {"zero": {"offload_optimizer": {"device": "cpu"}}}),
        pytest.param(
            2,
            {},
            {"gradient_accumulation_steps": 1, "fp16": {"enabled": True, "initial_scale_power": 4}},
            marks=needs_fp16(),
        ),
        (3, {"param_memory_budget": "all"}, {}),
        (3, {"param_memory_budget": "all"}, {"zero": {"offload_optimizer": {"device": "cpu"}}}),
    ],
)
def test_ragged_batches(stage: int, options: dict[str, Any], config: dict[str, Any]) -> None:
    half = "fp16" in config

    def run() -> float:
        net, plain = network(), network()
        engine = make_engine(net, torch.optim.AdamW(net.parameters(), lr=0.03), stage, **config)
        zerosync = attach(engine, loss_reduction="sum", **options)
        oracle = Oracle(plain, torch.optim.AdamW(plain.parameters(), lr=0.03))
        for step, by_rank in enumerate(TOKENS):
            everything = max(1, sum(map(sum, by_rank)))
            for of_rank, counts in enumerate(by_rank):
                for micro, tokens in enumerate(counts):
                    loss = total_loss(plain, step, of_rank, micro, tokens)
                    oracle.backward_on(of_rank, loss * len(by_rank) / everything)
            oracle.step(config.get("gradient_clipping", 0.0))
            counts = by_rank[rank()]
            if options.get("coalesce") is False:  # then all ranks make as many backwards
                counts = [*counts, 0, 0, 0][:3]
            for micro, tokens in enumerate(counts):
                zerosync.mean_over(torch.tensor(tokens) if micro % 2 else tokens)
                of_rank = rank()
                engine.backward(
                    total_loss(lambda x: engine(x.half() if half else x).float(), step, of_rank, micro, tokens)
                )
            engine.step()
        return distance(full_parameters(net), full_parameters(plain))

    for error in run_ranks(run):
        # Where half precision loses a gradient, AdamW moves the parameter by less than the learning rate.
        assert error <= (0.02 if half else 0.0)


def test_what_is_dropped_is_not_counted() -> None:
    """What DeepSpeed divides losses by is undone; and what is no count, or missing, is an error."""

    def run() -> float:
        net, plain = network(), network()
        engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=0.5), 2, gradient_accumulation_steps=2)
        zerosync = attach(engine, loss_reduction="sum")
        oracle = Oracle(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
        with pytest.raises(ValueError, match="takes a number of items, 0 or more, got -1"):
            zerosync.mean_over(-1)
        with pytest.raises(ValueError, match="got a tensor of 2 elements"):
            zerosync.mean_over(torch.ones(2))
        zerosync.mean_over(100)
        engine.backward(total_loss(engine, 0, rank(), 0, 5))
        engine.zero_grad()
        for micro in (0, 1):
            zerosync.mean_over(4)
            engine.backward(total_loss(engine, 1, rank(), micro, 4))
            oracle.backward(lambda r, m=micro: total_loss(plain, 1, r, m, 4) / 8)  # of 16 tokens, on two ranks
            engine.step()
        oracle.step()
        zerosync.mean_over(4)
        engine.backward(total_loss(engine, 2, rank(), 0, 4))
        zerosync.reduce()
        with pytest.raises(RuntimeError, match="between the reduction of the gradients and the optimizer step"):
            zerosync.mean_over(4)
        engine.zero_grad()
        engine.backward(total_loss(engine, 2, rank(), 0, 4))
        with pytest.raises(RuntimeError, match="was not called since the last optimizer step"):
            zerosync.reduce()
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]


def test_without_the_option() -> None:
    def run() -> None:
        net = network()
        zerosync = attach(make_engine(net, torch.optim.SGD(net.parameters(), lr=0.5), 2))
        with pytest.raises(ValueError, match="attach with the option loss_reduction='sum'"):
            zerosync.mean_over(4)

    run_ranks(run)
