"""Random small models and random training programs, run by an attached DeepSpeed engine and by the oracle."""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.harness.engines import make_engine
from tests.harness.experts import Tables
from tests.harness.oracle import Oracle

WIDTH = 6
# Budgets by level, of gradients or parameters; none: as with fewer ranks.
NODES = [None, {"device": 0, "node": "all"}, 600, {"device": 300}, {"device": 200, "node": 150}, {"node": 60}]


@dataclass
class Program:
    """A model, an engine configuration and a sequence of operations, all drawn from one seed."""

    seed: int
    stage: int
    world_size: int = 2
    operations: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.layers = draw.randint(1, 5)
        self.tied = draw.random() < 0.4 and self.layers > 1
        self.frozen = draw.random() < 0.4
        self.oversized = draw.random() < 0.5
        self.routed = random.Random(f"routed {self.seed}").random() < 0.5
        self.optimizer = draw.choice(["sgd", "momentum", "adamw"])
        self.two_groups = draw.random() < 0.4
        self.options: dict[str, Any] = {}
        self.zero = {
            "reduce_bucket_size": draw.choice([7, 40, 100, 1000, 100000]),
            "contiguous_gradients": draw.random() < 0.7,
            "overlap_comm": draw.random() < 0.5,
            "reduce_scatter": draw.random() < 0.7,
            "allgather_bucket_size": draw.choice([30, 100000]),
        }
        if self.stage == 3:
            self.zero |= {
                "stage3_param_persistence_threshold": draw.choice([0, 10, 100000]),
                "stage3_prefetch_bucket_size": draw.choice([0, 50, 100000]),
                "stage3_max_live_parameters": draw.choice([0, 100, 1000000]),
                "stage3_max_reuse_distance": draw.choice([0, 100, 1000000]),
                "sub_group_size": draw.choice([50, 1000000]),
            }
            self.options["param_memory_budget"] = draw.choice([0, 0, 400, "all"])
        else:
            self.zero["round_robin_gradients"] = draw.random() < 0.3
        coalesce = self.options["coalesce"] = draw.random() < 0.85
        if coalesce:
            self.options["grad_memory_budget"] = draw.choice([None, None, None, 0, 200, 1500, 10**6])
        if self.world_size > 3:  # enough for several nodes
            by_level = random.Random(f"nodes {self.seed}")
            for option in ("grad_memory_budget", "param_memory_budget"):
                if option in self.options:
                    self.options[option] = by_level.choice(NODES) or self.options[option]
        self.options["reduction"] = draw.choice(["native", "ordered"])
        self.options["overlap_last"] = draw.random() < 0.8
        # Reduced in one pass, or where a backward was wrongly taken for the last, in two.
        self.one_pass = coalesce and self.options["grad_memory_budget"] in (None, 10**6)
        # Unmanaged: DeepSpeed leaves the accumulation boundary to step(). Managed: one micro-batch a step.
        self.managed = draw.random() < 0.8
        if not self.managed and self.stage == 1:
            self.zero["overlap_comm"] = False  # DeepSpeed refuses the two together
        # A few elements are enough to cut layers anywhere; each chunk is an exchange, and thousands of them only cost.
        self.chunk_bytes = draw.choice([28, 100, 1000, 2**20]) * (8 if self.oversized else 1)
        # Ranks may make other numbers of backwards where nothing but a backward that is taken for the last reduces.
        uneven = random.Random(f"uneven {self.seed}")
        differ = self.one_pass and (self.stage < 3 or self.options["param_memory_budget"] == "all")
        for _ in range(draw.randint(2, 4)):
            backwards = draw.randint(1, 4)
            begins = len(self.operations)
            for k in range(backwards):
                how = draw.choice(["engine", "raw", "no_sync", "two forwards"])
                # Under stage 3 the order of gathers, and so the modules in use, must be the same on all ranks.
                skips = [draw.random() < 0.3 for _ in range(self.world_size)]
                if self.stage == 3:
                    skips = [skips[0]] * self.world_size
                if draw.random() < 0.3:
                    self.operations.append(("expect_last",))
                every = [True] * self.world_size
                self.operations.append(("backward", how, draw.randrange(10**6), skips, draw.choice([1.0, 0.25]), every))
                if k + 1 < backwards and draw.random() < 0.25:
                    # What is in the partition already, module.zero_grad() does not reach.
                    owners = ["engine", "optimizer", "module"][: 3 if self.one_pass else 2]
                    self.operations.append(("zero_grad", draw.choice(owners)))
                if draw.random() < 0.25:
                    self.operations.append(("evaluate",))
            kinds = {operation for operation, *_ in self.operations[begins:]}
            if differ and uneven.random() < 0.3 and "zero_grad" not in kinds:
                made = [details[-1] for operation, *details in self.operations[begins:] if operation == "backward"]
                for by_rank in made[1:]:
                    by_rank[uneven.randrange(self.world_size)] = False
            if draw.random() < 0.2:
                self.operations.append(("reduce",))
            self.operations.append(("step",))

    def model(self) -> "RandomModel":
        return RandomModel(self)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        params = [p for p in model.parameters() if p.requires_grad]
        half = len(params) // 2
        groups: list[dict[str, Any]] = [{"params": params}]
        if self.two_groups and half:
            groups = [{"params": params[:half]}, {"params": params[half:], "lr": 0.01}]
        if self.optimizer == "adamw":
            return torch.optim.AdamW(groups, lr=0.02)
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9 if self.optimizer == "momentum" else 0.0)

    def run_oracle(self) -> nn.Module:
        model = self.model()
        oracle = Oracle(model, self.make_optimizer(model), self.world_size)
        for operation, *details in self.operations:
            if operation == "backward":
                how, seed, skips, scale, made = details
                for rank in (rank for rank in range(self.world_size) if made[rank]):
                    loss = model(data(seed, rank), skips[rank]) * scale
                    if how == "two forwards":
                        loss = loss + model(data(seed + 1, rank), skips[rank])
                    oracle.backward_on(rank, loss)
            elif operation == "zero_grad":
                oracle.zero_grad()
            elif operation == "step":
                oracle.step()
        return model


class RandomModel(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(program.seed)
        self.body = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=k % 2 == 0) for k in range(program.layers))
        if program.tied:
            self.body[-1].weight = self.body[0].weight
        self.skipped = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, 1)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 60), nn.Linear(60, WIDTH)) if program.oversized else nn.Identity()
        self.still = nn.Linear(WIDTH, WIDTH).requires_grad_(False) if program.frozen else nn.Identity()
        self.scale = nn.Parameter(torch.ones(1))
        self.tables = Tables(WIDTH, 4) if program.routed else None

    def forward(self, x: torch.Tensor, skip: bool) -> torch.Tensor:
        routes = x  # by rank: a rank uses some of the tables
        for place, layer in enumerate(self.body):
            x = torch.tanh(layer(x))
            if place == 0 and self.tables is not None:
                x = torch.tanh(self.tables(x, routes))
        x = self.still(self.wide(x))
        if not skip:
            x = x + self.skipped(x)
        return (x * self.scale).square().mean()


def data(seed: int, rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed * 10 + rank))


def run_attached(program: Program, rank: int) -> nn.Module:
    """The program on this rank of a live process group, by an engine with ZeroSync attached."""
    from zerosync_strategy import attach
    from zerosync_strategy.core.comm import nodes

    model = program.model()
    accumulation = {} if program.managed else {"managed_gradient_accumulation": False}
    engine = make_engine(model, program.make_optimizer(model), program.stage, program.zero, **accumulation)
    nodes.WITHIN_HOST = nodes.MessageSizes(program.chunk_bytes, 2)
    zerosync = attach(engine, **program.options)
    steps = 0
    for operation, *details in program.operations:
        if operation == "backward":
            *how, made = details
            if made[rank]:
                _backward(engine, rank, *how)
        elif operation == "zero_grad":
            {"engine": engine, "optimizer": engine.optimizer, "module": model}[details[0]].zero_grad()
        elif operation == "evaluate":
            engine.eval()
            with torch.no_grad():
                engine(data(0, rank), False)
            engine.train()
        elif operation == "reduce":
            zerosync.reduce()
        elif operation == "expect_last":
            zerosync.window.expect_last()
        elif operation == "step":
            engine.step()
            steps += 1
            assert zerosync.report is not None and zerosync.report.step == steps == engine.global_steps
            assert not program.one_pass or zerosync.report.reductions <= 2, zerosync.report
    zerosync.detach()
    return model


def _backward(engine: Any, rank: int, how: str, seed: int, skips: list[bool], scale: float) -> None:
    loss = engine(data(seed, rank), skips[rank]) * scale
    if how == "raw":
        loss.backward()
    elif how == "two forwards":
        engine.backward(loss + engine(data(seed + 1, rank), skips[rank]))
    elif how == "no_sync":
        with engine.no_sync():
            engine.backward(loss)
    else:
        engine.backward(loss)
