"""Real DeepSpeed on simulated streams: branches whose backwards run on several producer streams."""

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

from tests.harness.engines import make_engine, start
from tests.harness.racecheck import Finding, Stream, simulate
from zerosync_strategy import attach

WIDTH = 32


class Branches(nn.Module):
    """Branches side by side, each on a stream: their gradients are completed in no order."""

    def __init__(
        self, streams: list[Stream], widths: tuple[int, ...], *, experts: bool, compiled: bool, unused: bool
    ) -> None:
        super().__init__()
        self.unused = unused
        self.streams = streams
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH), nn.Tanh()) for width in widths
        )
        if experts:
            self.branches[0] = Experts()
        for branch in self.branches if compiled else ():
            branch.compile(backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from deepspeed.accelerator import get_accelerator

        caller = get_accelerator().current_stream()
        outputs = []
        for index, branch in enumerate(self.branches[:-1] if self.unused else self.branches):
            stream = self.streams[index % len(self.streams)] if self.streams else caller
            stream.wait_stream(caller)
            with get_accelerator().stream(stream):
                outputs.append(branch(x.to(next(branch.parameters()).dtype)).to(x.dtype))
            x.record_stream(stream)
        for stream in self.streams:
            caller.wait_stream(stream)
        for output in outputs:
            output.record_stream(caller)
        return torch.stack(outputs).sum(0)


class Experts(nn.Module):
    """Each rank has one of two experts: its gradient is reduced over the ranks that have the same."""

    def __init__(self) -> None:
        super().__init__()
        expert = nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, expert, num_experts=2, ep_size=2, k=1, capacity_factor=4.0, min_capacity=0, use_rts=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(x)[0]


def train(
    stage: int, producers: int = 0, ours: dict[str, Any] | None = None, *, last: bool = False, oversized: bool = False,
    experts: bool = False, compiled: bool = False, half: bool = False, unused: bool = False, sgd: bool = False,
    before: Callable[[Any], None] = lambda engine: None, zero: dict[str, Any] | None = None, **config: Any,
) -> list[Finding]:  # fmt: skip
    """What the checker finds in two optimizer steps of two micro-batches; `ours` has ZeroSync's options.

    Gradients are in several buckets. `unused`: a branch has none. `sgd`: nothing in a step waits for the host or for
    other ranks: plain SGD, without clipping.
    """
    with simulate() as simulation:
        start()
        torch.manual_seed(0)
        streams = [Stream(name=f"producer {index}") for index in range(producers)]
        widths = (WIDTH, 3 * WIDTH if oversized else WIDTH, WIDTH, WIDTH)
        model = Branches(streams, widths, experts=experts, compiled=compiled, unused=unused)
        groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "name": "all"}]
        if experts:
            groups = split_params_into_different_moe_groups_for_optimizer(groups[0])
        if half:
            model.branches[1].bfloat16()
            groups = [
                {"params": [param for param in model.parameters() if param.dtype is dtype]}
                for dtype in (torch.float32, torch.bfloat16)
            ]
        accumulate = 1 if ours is not None else 2
        small = {"reduce_bucket_size": 2 * WIDTH * WIDTH, "stage3_param_persistence_threshold": 0}
        optimizer = torch.optim.SGD(groups, lr=0.1) if sgd else torch.optim.AdamW(groups)
        engine = make_engine(
            model, optimizer, stage, {"overlap_comm": True, **small, **(zero or {})},
            gradient_accumulation_steps=accumulate, gradient_clipping=0.0 if sgd else 1.0, **config,
        )  # fmt: skip
        before(engine)
        zerosync = None if ours is None else attach(engine, **ours)
        dtype = next(model.parameters()).dtype
        for _ in range(2):
            for micro_batch in range(2):
                loss = engine(torch.randn(2, WIDTH).to(dtype)).float().square().mean()
                if zerosync is not None and last and micro_batch:
                    zerosync.window.expect_last()
                engine.backward(loss)
                if zerosync is None or micro_batch:
                    engine.step()
        return simulation.findings
