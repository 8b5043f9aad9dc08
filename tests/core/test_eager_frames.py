"""Compiled models under ZeRO-3, and parameters read where no hook has gathered them (rule E1)."""

import copy
import gc
import os
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core import contract
from zerosync_strategy.core.cpu import prepare_cpu

WIDTH, WORDS, BACKWARDS = 16, 12, 2


def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale


class Block(nn.Module):
    """Two layers, a scale of its own that is passed to a function, and what makes a compiler stop in between."""

    def __init__(self, stop: str) -> None:
        super().__init__()
        self.stop = stop
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.up(x))
        for _ in range(2):
            if self.stop == "break":
                torch._dynamo.graph_break()
        if self.stop == "item" and y.sum().item() > 1e9:
            y = y * 2
        return x + scaled(self.down(y), self.scale)


class Uncompiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    @torch._dynamo.disable
    def forward(self, x: torch.Tensor, other: nn.Linear) -> torch.Tensor:
        for _ in range(2):
            x = x + F.linear(x @ self.weight, other.weight)
        return x


class LowRank(nn.Module):
    """An adapter beside a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, WIDTH) / 8)
        self.b = nn.Parameter(torch.randn(WIDTH, 2) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.base.weight, self.base.bias) + F.linear(F.linear(x, self.a), self.b)


class Model(nn.Module):
    """All that makes a parameter be read where nobody has gathered it."""

    def __init__(self, stop: str = "", layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(stop) for _ in range(layers))
        self.uncompiled, self.adapter, self.other = Uncompiled(), LowRank(), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        x = F.linear(self.uncompiled(x, self.other), self.other.weight, self.other.bias)
        x = self.adapter(x) * self.gain
        return F.cross_entropy(self.head(x) + F.linear(x, self.embedding.weight), words)


def data(k: int, rank: int) -> torch.Tensor:
    return torch.randint(WORDS, (8,), generator=torch.Generator().manual_seed(10 * k + rank))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.01)


def make_engine(model: nn.Module, **zero: Any) -> Any:
    prepare_cpu()
    deepspeed.init_distributed("gloo")
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, **zero}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": zero}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config, dist_init_required=False)
    return engine


def train(
    engine: Any, forward: Callable[..., Any], steps: int, after: Callable[[], None] = lambda: None
) -> list[float]:
    losses, rank = [], int(os.environ["RANK"])
    for k in range(steps * BACKWARDS):
        loss = forward(data(k, rank)) / BACKWARDS
        engine.backward(loss)
        losses.append(loss.item())
        if (k + 1) % BACKWARDS == 0:
            engine.step()
            after()
    return losses


def oracle(steps: int, stop: str = "") -> dict[str, torch.Tensor]:
    model = Model(stop)
    plain = Oracle(model, adamw(model))
    for k in range(steps * BACKWARDS):
        plain.backward(lambda rank, k=k: model(data(k, rank)) / BACKWARDS)
        if (k + 1) % BACKWARDS == 0:
            plain.step()
    return full_parameters(model)


def compiled(how: str, backend: str, stop: str = "", stock: bool = False, **options: Any) -> tuple[Any, Any, Any]:
    """The engine of a compiled model, its forward, and ZeroSync's handle."""
    model: Any = Model(stop)
    engine = make_engine(torch.compile(model, backend=backend) if how == "before" else model)
    zerosync = None if stock else attach(engine, **options)
    if how == "engine":
        engine.compile(backend=backend)
    if how == "modules":
        for module in model.modules():
            if isinstance(module, (Block, LowRank)):
                module.compile(backend=backend)
    return engine, torch.compile(engine, backend=backend) if how == "after" else engine, zerosync


def gathered(engine: Any) -> list[str]:
    return [name for name, param in engine.module.named_parameters() if param.ds_status.name == "AVAILABLE"]


CASES = [
    ("none", "", "", {}),
    ("before", "aot_eager", "", {}),
    ("engine", "aot_eager", "break", {"trace_gathers": True}),
    ("modules", "eager", "item", {"param_memory_budget": "all"}),
    ("after", "eager", "", {"trace_gathers": True, "grad_memory_budget": 0}),
]
SLOW = [
    (how, backend, stop, {"trace_gathers": trace})
    for how in ("before", "engine", "modules", "after")
    for backend in ("eager", "aot_eager")
    for stop in ("", "break", "item")
    for trace in (False, True)
]


@pytest.mark.parametrize(
    ("how", "backend", "stop", "options"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_equal_to_plain_torch(how: str, backend: str, stop: str, options: dict[str, Any]) -> None:
    def run() -> tuple[float, list[str]]:
        engine, forward, zerosync = compiled(how, backend, stop, **options)
        train(engine, forward, 3)
        left = gathered(engine)
        assert zerosync.report.backwards == BACKWARDS
        return distance(full_parameters(engine.module), oracle(3, stop)), left

    exact = "grad_memory_budget" not in options
    for error, left in run_ranks(run):
        assert error == 0.0 if exact else error < 1e-6
        assert left == []


def test_with_inductor_up_to_its_rounding(tmp_path: Any) -> None:
    def run(trace_gathers: bool) -> float:
        torch._inductor.config.compile_threads = 1
        engine, forward, _ = compiled("engine", "inductor", trace_gathers=trace_gathers)
        train(engine, forward, 2)
        return distance(full_parameters(engine.module), oracle(2))

    for error in run_ranks(run, True, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}, timeout=280):
        assert error < 1e-5
