"""Tensor parallelism beside ZeRO, by an ``mpu`` as Megatron's and by AutoTP; the oracle has whole weights."""

import os
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed import comm
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.harness.data import noise
from tests.harness.engines import configuration, rank, start
from tests.harness.oracle import NORM, Oracle, distance, full_parameters
from tests.harness.ranks import SIMULATED, run_ranks
from tests.harness.releases import since
from zerosync_strategy import attach

WIDTH, CLIP, STEPS, BACKWARDS = 8, 0.05, 3, 2
ROUNDED = 1e-6  # beyond the oracle's bounds: the ranks' parts of a product are added in another order than its own
inputs = noise(4, WIDTH)


class Grid:
    """Ranks in rows of ``size`` that share each layer; columns have the same part of it, and other data."""

    def __init__(self, size: int = 2) -> None:
        count = dist.get_world_size() // size
        rows = [dist.new_group([row * size + place for place in range(size)]) for row in range(count)]
        columns = [dist.new_group([row * size + place for row in range(count)]) for place in range(size)]
        self.size, (self.row, self.place) = size, divmod(rank(), size)
        self.tensor, self.data = rows[self.row], columns[self.place]

    def __getattr__(self, name: str) -> Any:
        """The functions of an ``mpu``."""
        _, _, what = name.partition("get_")
        of_data = what.startswith("data_parallel")
        if not of_data and not what.startswith(("model_parallel", "tensor_model_parallel")):
            raise AttributeError(name)
        group = self.data if of_data else self.tensor
        values = {"group": group, "rank": dist.get_rank(group), "size": dist.get_world_size(group)}
        return lambda: values[what.rpartition("_")[2]]


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.clone()
        comm.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        comm.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class Block(nn.Module):
    """Whole, or the part of one rank: ``up`` by columns and ``down`` by rows; the others are replicated."""

    def __init__(self, grid: Grid | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH, bias=False)
        self.bias, self.grid = nn.Parameter(torch.randn(WIDTH)), grid
        if grid is not None:
            for param, dim in ((self.up.weight, 0), (self.up.bias, 0), (self.down.weight, 1)):
                param.data = part(param.data, dim, grid).clone()
                param.tensor_model_parallel = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.grid is None:
            return x + self.down(self.up(self.norm(x)).relu()) + self.bias
        inner = self.down(self.up(Enter.apply(self.norm(x), self.grid.tensor)).relu())
        return x + Leave.apply(inner, self.grid.tensor) + self.bias


def part(whole: torch.Tensor, dim: int, grid: Grid) -> torch.Tensor:
    return whole.chunk(grid.size, dim)[grid.place]


def parts(whole: dict[str, torch.Tensor], like: dict[str, torch.Tensor], grid: Grid) -> dict[str, torch.Tensor]:
    """Of parameters of the whole model, what this rank has: the same, or a part in the dimension that is shorter."""
    found = {}
    for name, value in whole.items():
        shorter = [dim for dim, size in enumerate(like[name].shape) if size != value.shape[dim]]
        found[name] = part(value, shorter[0], grid) if shorter else value
        if shorter and isinstance(bound := getattr(value, "rounding", None), torch.Tensor):
            found[name].rounding = part(bound, shorter[0], grid)
    return found


def train(engine: Any, zerosync: Any, plain: nn.Module, loss_of: Any, grid: Grid, folder: Path) -> float:
    """Clipped steps, one of which a load of a checkpoint takes back; how far it is from plain torch."""
    oracle = Oracle(plain, sgd(plain), dist.get_world_size() // grid.size)
    for step in range(STEPS):
        first = step * BACKWARDS
        for k in range(first, first + BACKWARDS):
            engine.backward(loss_of(engine, k, grid.row))
            oracle.backward(lambda r, k=k: loss_of(plain, k, r))
        norm = float(zerosync.gradient_norm())
        assert abs(norm / oracle.step(CLIP) - 1) < NORM
        assert norm > CLIP
        engine.step()
        if step == 0:
            engine.save_checkpoint(str(folder))
            engine.backward(loss_of(engine, 0, 1))
            engine.step()
            engine.load_checkpoint(str(folder))
    found = full_parameters(engine.module)
    return distance(found, parts(full_parameters(plain), found, grid))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


@pytest.mark.extended(but=("2-1", "4-3"))
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 4])
def test_as_megatron_does_it(stage: int, world_size: int, tmp_path: Path) -> None:
    """Its own collectives, of layers, are in no report."""

    def run() -> tuple[float, int]:
        start()
        grid = Grid()
        model, plain = nn.Sequential(Block(grid), Block(grid)), nn.Sequential(Block(), Block())
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=sgd(model), mpu=grid, config=configuration(stage, gradient_clipping=CLIP),
            dist_init_required=False,
        )  # fmt: skip
        zerosync = attach(engine)
        error = train(engine, zerosync, plain, lambda net, k, r: net(inputs(k, r)).square().mean(), grid, tmp_path)
        return error, zerosync.report.collectives["all_reduce"].calls

    errors, calls = zip(*run_ranks(run, world_size=world_size), strict=True)
    assert max(errors) < ROUNDED
    compares = stage == 3 and SIMULATED in os.environ  # on NCCL, what ranks have gathered (W4)
    assert set(calls) == {1 + compares}  # the norm, with what ranks say of their backwards


@pytest.mark.extended
@pytest.mark.parametrize(
    "stage", [1, 2, pytest.param(3, marks=since("0.19.8", "earlier ones refuse AutoTP on stage 3"))]
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_by_autotp(stage: int, world_size: int, tmp_path: Path) -> None:
    def llama() -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes)).eval()

    def loss_of(net: Any, k: int, row: int) -> torch.Tensor:
        tokens = (torch.arange(8)[None] * (k + 2) + row) % 32
        return net(input_ids=tokens, labels=tokens).loss

    def run() -> float:
        start()
        grid, model, plain = Grid(), llama(), llama()
        config = configuration(stage, gradient_clipping=CLIP, tensor_parallel={"autotp_size": 2})
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
            config=config,
            dist_init_required=False,
        )
        return train(engine, attach(engine), plain, loss_of, grid, tmp_path)

    assert max(run_ranks(run, world_size=world_size)) < ROUNDED


@pytest.mark.extended
@pytest.mark.off_device("its communicator takes no call of a rank that is not in the group")
def test_a_programs_own_collectives() -> None:
    """Over groups with any ranks, also where no launcher says the nodes; a rank that is in none may call them."""

    def run() -> tuple[float, int]:
        start()
        grid, one, pair = Grid(), dist.new_group([1]), dist.new_group([2, 3])
        model = nn.Linear(4, 4)
        config = configuration(2)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=sgd(model), mpu=grid, config=config, dist_init_required=False
        )
        zerosync, total = attach(engine), torch.ones(1)
        for group in (one, pair, grid.tensor, None):
            comm.all_reduce(total, group=group)
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        return total.item(), zerosync.report.bytes_sent > 0

    for env in ({"LOCAL_WORLD_SIZE": "0"}, {"LOCAL_WORLD_SIZE": "2"}):
        assert run_ranks(run, world_size=4, env=env) == [(12.0, True)] * 4
