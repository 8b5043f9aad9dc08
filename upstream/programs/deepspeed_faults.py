"""What stock DeepSpeed gets wrong without an error, each as its smallest program, against plain torch in one process.

    torchrun --nproc_per_node 2 upstream/programs/deepspeed_faults.py [--zerosync] [NAME ...]

Each function trains as a program would, and again in plain torch, and returns how far the two sets of parameters are
apart. ``--zerosync`` attaches ZeroSync, which makes it right, or raises an error that says what to do.
"""

import argparse
import copy
import warnings
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from faults import report
from torch import nn

WITH_ZEROSYNC = False


def engine_of(
    module: nn.Module, optimizer: torch.optim.Optimizer, stage: int, zero: dict[str, Any] | None = None, **config: Any
) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **(zero or {})},
        **config,
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    if WITH_ZEROSYNC:
        from zerosync_strategy import attach

        attach(engine)
    return engine


def batch(step: int, rank: int, width: int = 6) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output - 1).square().mean()


def mean_loss(module: Callable[..., torch.Tensor], step: int, **options: Any) -> torch.Tensor:
    """Return the loss over the batches of all ranks, as plain torch in one process computes it."""
    losses = [loss_of(module(batch(step, rank), **options)) for rank in range(dist.get_world_size())]
    return torch.stack(losses).mean()


def apart(engine: Any, plain: nn.Module) -> float:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        pairs = zip(engine.module.parameters(), plain.parameters(), strict=True)
        return max((a.detach() - b.detach()).abs().max().item() for a, b in pairs)


def trained_apart(
    engine: Any, plain: nn.Module, optimizer: torch.optim.Optimizer, between: Callable[[], None] = lambda: None
) -> float:
    """Return how far apart three steps of both lead; ``between`` is called after each."""
    for step in range(3):
        engine.backward(loss_of(engine(batch(step, dist.get_rank()))))
        engine.step()
        optimizer.zero_grad()
        mean_loss(plain, step).backward()
        optimizer.step()
        between()
    return apart(engine, plain)


def thawed_later() -> float:
    """Stage 2: a layer that is frozen while the engine is built, and thawed afterwards, is never trained."""
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    plain = copy.deepcopy(module)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    module[0].requires_grad_(False)
    engine = engine_of(module, torch.optim.SGD(module.parameters(), lr=0.1), 2)
    module[0].requires_grad_(True)
    return trained_apart(engine, plain, optimizer)


def edited_between_steps() -> float:
    """Stage 2: what a program writes to parameters between two steps, here a clamp, is undone by the next step."""
    module = nn.Linear(6, 3)
    plain = copy.deepcopy(module)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine = engine_of(module, torch.optim.SGD(module.parameters(), lr=0.1), 2)

    def clamp() -> None:
        with torch.no_grad():
            module.weight.clamp_(-0.1, 0.1)
            plain.weight.clamp_(-0.1, 0.1)

    return trained_apart(engine, plain, optimizer, between=clamp)


def optimizer_of_whole_matrices() -> float:
    """Stage 2: an optimizer that computes with whole matrices, here Adafactor, is given flat shards."""
    module = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3))
    plain = copy.deepcopy(module)
    optimizer = torch.optim.Adafactor(plain.parameters(), lr=0.1)
    engine = engine_of(module, torch.optim.Adafactor(module.parameters(), lr=0.1), 2)
    return trained_apart(engine, plain, optimizer)


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, second: bool) -> torch.Tensor:
        output: torch.Tensor = (self.second if second else self.first)(self.trunk(x))
        return output


def unused_in_a_coalesced_window() -> float:
    """Stage 3, coalesce_grad_reduction(): a layer that this window leaves out is stepped by its last gradient."""
    module = _TwoHeads()
    plain = copy.deepcopy(module)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    zero = {"stage3_param_persistence_threshold": 0}
    engine = engine_of(module, torch.optim.SGD(module.parameters(), lr=0.1), 3, zero)
    for step, second in enumerate((True, False, False)):
        with engine.coalesce_grad_reduction():
            engine.backward(loss_of(engine(batch(step, dist.get_rank()), second=second)))
        engine.step()
        optimizer.zero_grad()
        mean_loss(plain, step, second=second).backward()
        optimizer.step()
    return apart(engine, plain)


def predivided() -> float:
    """Stage 3, reduce_scatter=false: gradient_predivide_factor = W divides, and nothing multiplies back."""
    module = nn.Linear(6, 3)
    plain = copy.deepcopy(module)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine = engine_of(
        module, torch.optim.SGD(module.parameters(), lr=0.1), 3, {"reduce_scatter": False},
        gradient_predivide_factor=dist.get_world_size(),
    )  # fmt: skip
    engine.backward(loss_of(engine(batch(0, dist.get_rank()))))
    engine.step()
    mean_loss(plain, 0).backward()
    optimizer.step()
    return apart(engine, plain)


class _OneMatrix(nn.Module):
    """The weights of two layers are the same memory, though not the same parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight.data = self.first.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(self.first(x))
        return output


def shared_memory() -> float:
    """Stage 2: parameters that share memory by .data are copied apart, and trained as two."""
    module, plain = _OneMatrix(), _OneMatrix()
    plain.load_state_dict(module.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine = engine_of(module, torch.optim.SGD(module.parameters(), lr=0.1), 2)
    return trained_apart(engine, plain, optimizer)


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


def complex_parameters() -> float:
    """Stage 2: complex parameters lose their imaginary part."""
    module = _Complex()
    plain = copy.deepcopy(module)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine = engine_of(module, torch.optim.SGD(module.parameters(), lr=0.1), 2)
    return trained_apart(engine, plain, optimizer)


PROGRAMS = (
    thawed_later, edited_between_steps, optimizer_of_whole_matrices, unused_in_a_coalesced_window, predivided,
    shared_memory, complex_parameters,
)  # fmt: skip


def main() -> None:
    global WITH_ZEROSYNC
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zerosync", action="store_true")
    parser.add_argument("names", nargs="*", default=[program.__name__ for program in PROGRAMS])
    options = parser.parse_args()
    WITH_ZEROSYNC = options.zerosync
    warnings.simplefilter("ignore")
    if WITH_ZEROSYNC:
        from zerosync_strategy import prepare_cpu

        prepare_cpu()
    else:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or DeepSpeed looks for a compiler
    deepspeed.init_distributed("gloo")
    report(PROGRAMS, options.names)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
