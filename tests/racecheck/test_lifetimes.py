"""Memory that one stream has allocated and another uses, where a program does more than forward, backward, step."""

import gc
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from tests.harness.engines import make_engine
from tests.harness.racecheck import Stream, simulate
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach

WIDTH = 16


class Apart(nn.Module):
    """Layers side by side, each on a stream of its own. The first is the last in the backward."""

    def __init__(self, streams: list[Stream]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.streams, self.fails = streams, False
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in streams)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        caller, outputs = get_accelerator().current_stream(), []
        for layer, stream in zip(self.layers, self.streams, strict=True):
            stream.wait_stream(caller)
            x.record_stream(stream)
            with get_accelerator().stream(stream):
                outputs.append(layer(x))
                if self.fails and len(outputs) == 1:
                    outputs[0].register_hook(fail)
        for stream, output in zip(self.streams, outputs, strict=True):
            caller.wait_stream(stream)
            output.record_stream(caller)
        return torch.stack(outputs).square().mean()


def fail(_: torch.Tensor) -> None:
    raise OverflowError


def allocate_on(streams: list[Any]) -> None:
    """As whatever the program computes next on each of them, and waits for nothing."""
    for stream in streams:
        with get_accelerator().stream(stream):
            for numel in (WIDTH, WIDTH * WIDTH, 3 * WIDTH * (WIDTH + 1)):
                torch.empty(numel).zero_()


def aborts(engine: Any, streams: list[Stream], mine: Stream) -> None:
    """A backward that fails when two layers have their gradients in the memory of one bucket."""
    engine.module.fails = True
    with pytest.raises(OverflowError):
        engine.backward(engine(torch.randn(2, WIDTH)))
    engine.module.fails = False
    allocate_on([*streams, mine])


def differentiates_gradients(engine: Any, streams: list[Stream], mine: Stream) -> None:
    """Gradients with a graph stay where autograd has put them."""
    engine(torch.randn(2, WIDTH)).backward(create_graph=True)
    engine.step()
    gc.collect()
    allocate_on([*streams, mine])


def reads_elsewhere(engine: Any, streams: list[Stream], mine: Stream) -> None:
    """On a stream that has waited for nothing: no backward writes parameters."""
    engine.backward(engine(torch.randn(2, WIDTH)))
    with get_accelerator().stream(mine):
        for _, value in engine._zerosync.full_weights():
            value.norm()
    get_accelerator().current_stream().wait_stream(mine)
    engine.step()


def gathers_elsewhere(engine: Any, streams: list[Stream], mine: Stream) -> None:
    """The same by a context."""
    engine.backward(engine(torch.randn(2, WIDTH)))
    params = list(engine.module.parameters())
    with get_accelerator().stream(mine), deepspeed.zero.GatheredParameters(params):
        for param in params:
            param.norm()
    get_accelerator().current_stream().wait_stream(mine)
    engine.step()


def replaces(engine: Any, streams: list[Stream], mine: Stream) -> None:
    """A module puts memory of its own in the place of a parameter of which there is a copy on the host."""
    layer = engine.module.layers[0]

    def halve(module: nn.Linear, _: Any) -> None:
        module.weight.data = module.weight.data * 0.5

    engine.backward(engine(torch.randn(2, WIDTH)))
    with layer.register_forward_pre_hook(halve), torch.no_grad():  # else autograd keeps that memory for the backward
        engine(torch.randn(2, WIDTH))
    allocate_on([*streams, get_accelerator().current_stream()])
    engine.step()


@pytest.mark.extended(
    but=(
        "reads_elsewhere-3-options5",
        "gathers_elsewhere-3-options6",
        "replaces-3-options7",
    )
)
@pytest.mark.parametrize(
    ("does", "stage", "options"),
    [
        (aborts, 1, {}),
        (aborts, 2, {}),
        (aborts, 3, {}),
        (differentiates_gradients, 1, {}),
        (differentiates_gradients, 2, {}),
        (reads_elsewhere, 3, {"param_memory_budget": "all"}),
        (gathers_elsewhere, 3, {}),
        (replaces, 3, {"param_memory_budget": {"device": 0, "host": "all"}}),
    ],
)
def test_memory_is_kept(does: Callable[[Any, list[Stream], Stream], None], stage: int, options: dict[str, Any]) -> None:
    def run() -> list[str]:
        with simulate() as simulation:
            streams = [Stream(name=f"layer {index}") for index in range(3)]
            net = Apart(streams)
            zero = {"overlap_comm": True, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
            engine = make_engine(net, torch.optim.AdamW(net.parameters()), stage, zero)
            engine._zerosync = attach(engine, **options)
            for _ in range(2):
                does(engine, streams, Stream(name="mine"))
                for _ in range(2):
                    engine.backward(engine(torch.randn(2, WIDTH)))
                engine.step()
            return list(map(str, simulation.findings))

    assert run_ranks(run) == [[], []]
