"""A parameter that is used on several compute streams is there on each of them (U2)."""

from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from tests.harness.engines import make_engine
from tests.harness.racecheck import Stream, simulate
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.comm.streams import Streams

WIDTH = 16


class Shared(nn.Module):
    """Layers of which each runs on every stream, and each on another one first. With gradients, on one stream."""

    def __init__(self, streams: list[Stream], bias: bool = True) -> None:
        super().__init__()
        self.streams = streams
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias) for _ in range(4))
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        caller, streams = get_accelerator().current_stream(), self.streams
        if torch.is_grad_enabled():
            streams = streams[:1]
        values = [x for _ in streams]
        for stream in streams:
            stream.wait_stream(caller)
            x.record_stream(stream)
        for number, layer in enumerate(self.layers):
            for turn in range(len(values)):
                index = (number + self.forwards + turn) % len(values)
                with get_accelerator().stream(streams[index]):
                    values[index] = layer(values[index]).tanh()
        self.forwards += 1
        if not torch.is_grad_enabled():
            self.layers[0].weight.norm()  # on the caller's stream, which has waited for no other yet
        for stream, value in zip(streams, values, strict=True):
            caller.wait_stream(stream)
            value.record_stream(caller)
        return torch.stack(values).sum(0)


def findings(stage: int, zero: dict[str, Any], ours: dict[str, Any], bias: bool = True) -> list[str]:
    with simulate() as simulation:
        torch.manual_seed(0)
        net = Shared([Stream(name=f"compute {index}") for index in range(3)], bias)
        small = {"overlap_comm": True, "reduce_bucket_size": 300, "stage3_param_persistence_threshold": 0}
        engine = make_engine(net, torch.optim.AdamW(net.parameters()), stage, {**small, **zero})
        attach(engine, **ours)
        for _ in range(5):
            for micro_batch in range(2):
                if micro_batch == 0:
                    with torch.no_grad():
                        engine(torch.randn(2, WIDTH))
                engine.backward(engine(torch.randn(2, WIDTH)).square().mean())
            engine.step()
        return list(map(str, simulation.findings))


FEW_HELD = {"param_memory_budget": 4 * WIDTH * WIDTH * 2 + 8 * WIDTH}
HOST = {"param_memory_budget": {"device": 4 * WIDTH * WIDTH, "host": "all"}}


@pytest.mark.extended(
    but=(
        "ours0-zero0",
        "ours1-zero1",
        "ours2-zero2",
        "ours4-zero4",
        "ours5-zero5",
    )
)
@pytest.mark.parametrize(
    ("ours", "zero"),
    [
        ({}, {}),
        ({}, {"stage3_max_reuse_distance": 0}),
        ({"param_memory_budget": "all"}, {}),
        (FEW_HELD, {"stage3_param_persistence_threshold": 100}),
        (HOST, {"stage3_param_persistence_threshold": 100, "stage3_max_reuse_distance": 0}),
        ({}, {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}),
    ],
)
def test_stage_3(ours: dict[str, Any], zero: dict[str, Any]) -> None:
    assert run_ranks(lambda: findings(3, zero, ours)) == [[], []]


def test_what_deepspeed_gathers() -> None:
    """For a gather of one parameter, it does not keep the memory from which we copy the values."""
    zero = {"zero_hpz_partition_size": 2, "stage3_max_reuse_distance": 0}
    assert run_ranks(lambda: findings(3, zero, {}, bias=False)) == [[], []]


def test_node_shards_are_filled_before_another_stream_reads_them() -> None:
    ours = {"param_memory_budget": {"device": 0, "node": "all"}, "node_size": 2}
    assert run_ranks(lambda: findings(3, {"stage3_max_reuse_distance": 0}, ours), world_size=4) == [[]] * 4


def test_memory_is_kept_for_every_stream_that_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """L2, switched off."""
    monkeypatch.setattr(Streams, "keep_for_caller", lambda self, memory: None)
    for found in run_ranks(lambda: findings(3, {"stage3_max_reuse_distance": 0}, {})):
        assert any(text.startswith("reuse") and "read by addmm" in text for text in found), found
