"""Training with gradients that several streams produce, as slowly as a test wants, and reductions that are slow too.

Streams are the accelerator's: CUDA's, or those that a race check on the CPU simulates.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from tests.harness.engines import make_engine
from tests.harness.oracle import full_parameters
from zerosync_strategy import attach
from zerosync_strategy.core.gradients.pipeline import ReductionPipeline

WIDTH = 512
CYCLES = 20_000_000  # some 10 ms on a GPU


class Slow(torch.autograd.Function):
    """Nothing, but that its backward keeps its stream busy for a while."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cycles: int) -> torch.Tensor:
        ctx.cycles = cycles
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.cycles:
            torch.cuda._sleep(ctx.cycles)
        return gradient, None


class Producers(nn.Module):
    """Branches, each of which runs on one of ``streams``; without streams, on the current one."""

    def __init__(self, cycles: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.streams: list[Any] = []
        self.cycles = cycles
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, device = [], get_accelerator()
        for index, branch in enumerate(self.branches):
            stream = self.streams[index % len(self.streams)] if self.streams else None
            if stream is not None:
                stream.wait_stream(device.current_stream())
                x.record_stream(stream)
            with device.stream(stream) if stream is not None else nullcontext():
                outputs.append(Slow.apply(branch(x), self.cycles))
        for stream, output in zip(self.streams, outputs, strict=False):
            device.current_stream().wait_stream(stream)
            output.record_stream(device.current_stream())
        return torch.stack(outputs).sum(0)


def make(
    streams: int, *, stage: int = 2, cycles: int = 0, compiled: bool = False, ours: dict[str, Any] | None, **zero: Any
) -> Any:
    """An engine on this rank's device, with ZeroSync if ``ours`` has its options; its handle is ``engine.handle``."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if not deepspeed.comm.is_initialized():
            deepspeed.init_distributed("nccl")
    net = Producers(cycles).to(device)
    for branch in net.branches if compiled else ():
        branch.compile()
    engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=0.1), stage, {"overlap_comm": True, **zero})
    engine.handle = None if ours is None else attach(engine, **ours)
    net.streams = [get_accelerator().Stream() for _ in range(streams)]
    return engine


def backward(engine: Any, k: int) -> None:
    """One micro-batch; ``k`` draws it."""
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * k + engine.global_rank))
    x = x.to(engine.device)
    engine.backward((engine(x) - x).square().mean())


def train(steps: int, *args: Any, pressure: bool = False, **kwargs: Any) -> dict[str, torch.Tensor]:
    """The parameters after so many optimizer steps of two micro-batches."""
    engine = make(*args, **kwargs)
    for k in range(2 * steps):
        if pressure:
            spoil([torch.cuda.current_stream(), *engine.module.streams])
        backward(engine, k)
        if k % 2:
            engine.step()
    return full_parameters(engine.module)


def spoil(streams: list[Any]) -> None:
    """Let memory that ``streams`` are given next hold no number, until they write to it."""
    for stream in streams:
        with torch.cuda.stream(stream):
            for numel in (WIDTH, WIDTH * WIDTH):
                blocks = [torch.full((numel,), torch.nan, device="cuda") for _ in range(8)]
                del blocks


@contextmanager
def slow_reductions(read_late: bool = True) -> Iterator[list[Any]]:
    """Each bucket is read late on the reduction stream, or its reduction ends late; the list gets an event after it."""
    stock, ends = ReductionPipeline.launch, []

    def launch(self: ReductionPipeline, bucket: Any) -> None:
        if read_late:
            torch.cuda._sleep(CYCLES)
        stock(self, bucket)
        if not read_late:
            torch.cuda._sleep(CYCLES)
        ends.append(torch.cuda.current_stream().record_event())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReductionPipeline, "launch", launch)
        yield ends
