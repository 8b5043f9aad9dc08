"""A model whose layers belong to several process groups, its ZeRO-3 engine, and one process that holds all of it."""

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from tests.harness import engines
from tests.harness.data import noise
from tests.harness.engines import configuration, rank
from tests.harness.oracle import Oracle, distance, full_parameters, value_of
from zerosync_strategy import shard_over

WORLD, WIDTH, BACKWARDS = 4, 8, 2
ROWS, COLUMNS = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
# By layout: which layers are sharded over which groups of ranks. Those that are not named are over all.
LAYOUTS = {"halves": {"second": ROWS}, "grid": {"second": ROWS, "third": COLUMNS}}


class Model(nn.Module):
    """Some layers are each group's own. Two share an input, one runs twice, one has parameters of two groups."""

    def __init__(self, built_over: Callable[[str], Any]) -> None:
        super().__init__()
        for name in ("first", "second", "third", "fourth"):
            with built_over(name):
                setattr(self, name, nn.Linear(WIDTH, WIDTH))
        self.fourth.borrowed = self.second.weight

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        x = torch.tanh(self.first(x)) + x
        b, c = self.second(x), x if skip else self.third(x)
        x = torch.tanh(self.second(b + c)) + x
        return (self.fourth(x) @ self.fourth.borrowed).square().mean()


class Reads(Model):
    """Reads parameters of each group where no hook gathers them: before their own module runs, and after."""

    ahead = "third"

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        x = torch.tanh(x @ getattr(self, self.ahead).weight) + x
        return super().forward(x, skip) + F.linear(x, self.second.weight, self.second.bias).square().mean()


data = noise(4, WIDTH)


def skips(k: int) -> bool:
    """Whether all ranks skip a layer in this forward."""
    return k == 1


def values(name: str, group: list[int], like: torch.Tensor) -> torch.Tensor:
    """The initial values of a parameter, others in each group."""
    seed = sum(map(ord, name)) * 100 + group[0] * 10 + len(group)
    return 0.5 * torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


class _Nothing:
    """As a context: over all ranks."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class Reference:
    """Plain torch in one process: the parameters of all groups, and each rank's model of those that it has."""

    def __init__(
        self, layout: dict[str, list[list[int]]], optimizer: Callable[[Any], Any], kind: type[Model] = Model
    ) -> None:
        self.model = kind(lambda name: _Nothing())
        self.groups = {
            name: layout.get(name.split(".")[0], [list(range(WORLD))]) for name, _ in self.model.named_parameters()
        }
        self.params = {
            (name, tuple(group)): nn.Parameter(values(name, group, param.detach()))
            for name, param in self.model.named_parameters()
            for group in self.groups[name]
        }
        self.oracle = Oracle(self.model, optimizer(list(self.params.values())), WORLD)

    def of_rank(self, rank: int) -> dict[str, torch.Tensor]:
        found = {}
        for (name, group), param in self.params.items():
            if rank in group:
                found[name] = param
        return found

    def train(self, steps: int, clip: float = 0.0) -> list[float]:
        norms = []
        for k in range(steps * BACKWARDS):
            self.oracle.backward(
                lambda rank, k=k: functional_call(self.model, self.of_rank(rank), (data(k, rank), skips(k))) / BACKWARDS
            )
            if (k + 1) % BACKWARDS == 0:
                norms.append(self.oracle.step(clip))
        return norms


_made: dict[str, list[Any]] = {}


def process_groups(layout: dict[str, list[list[int]]]) -> dict[str, Any]:
    """This rank's process group by layer; every rank makes all of them."""
    mine: dict[str, Any] = {}
    for name, groups in layout.items():
        if str(groups) not in _made:
            _made[str(groups)] = [dist.new_group(group) for group in groups]
        mine[name] = next(made for made, group in zip(_made[str(groups)], groups, strict=True) if rank() in group)
    return mine


def make_engine(
    layout: dict[str, list[list[int]]], optimizer: Callable[[Any], Any], zero_init: bool = False, clip: float = 0.0,
    zero: dict[str, Any] | None = None, kind: type[Model] = Model,
) -> Any:  # fmt: skip
    engines.start()
    groups = process_groups(layout)
    zero = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 100, **(zero or {})}

    def built_over(name: str) -> Any:
        return shard_over(groups[name]) if name in groups else _Nothing()

    if zero_init:
        with deepspeed.zero.Init(config_dict_or_path=configuration(3, zero)):
            model = kind(built_over)
    else:
        torch.manual_seed(rank())  # a broadcast to all ranks would show
        model = kind(built_over)
    for name, param in model.named_parameters():
        group = next(g for g in layout.get(name.split(".")[0], [list(range(WORLD))]) if rank() in g)
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0, enabled=zero_init):
            param.data.copy_(values(name, group, param.data))
    return engines.make_engine(model, optimizer(model.parameters()), zero=zero, gradient_clipping=clip)


def train(engine: Any, first: int, last: int) -> list[float]:
    """Optimizer steps `first` to `last`; the norms of their gradients."""
    norms = []
    for k in range(first * BACKWARDS, last * BACKWARDS):
        engine.backward(engine(data(k, rank()), skip=skips(k)) / BACKWARDS)
        if (k + 1) % BACKWARDS == 0:
            engine.step()
            norms.append(float(engine.get_global_grad_norm()))
    return norms


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02)


def error_of(engine: Any, reference: Reference) -> float:
    """The largest difference of any parameter of this rank. A collective call."""
    own = reference.of_rank(rank())
    return distance(full_parameters(engine.module), {name: value_of(param) for name, param in own.items()})
